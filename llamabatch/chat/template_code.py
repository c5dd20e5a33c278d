"""Generates the code of compiled chat templates: jinja2's code, with added payments for blocks and operands."""

from __future__ import annotations

from collections import abc
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

_STEP, _NODE = 128, 48  # prices in units: a block, and each node in the block


class Generator(CodeGenerator):
    """A code generator that adds the payments to the compiled code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wrapped: dict[int, str] = {}  # id of an expression -> start of the call that wraps the expression

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        opening = self._wrapped.pop(id(node), None)
        if opening is not None:
            self.write(opening)
        result = super().visit(node, *args, **kwargs)
        if opening is not None:
            self.write(")")
        return result

    def blockvisit(self, body: abc.Iterable[nodes.Node], frame: Frame) -> None:
        body = list(body)
        self.writeline(f"environment.spend({_price(body)})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # the test also runs for dropped items
            self._wrapped[id(node.test)] = f"(environment.tick({_price([node.test])}) and "
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        for operand in node.nodes:
            self._lighten(operand)
        super().visit_Concat(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._lighten(node.expr)
        for operand in node.ops:
            self._lighten(operand.expr, "holder" if operand.op in ("in", "notin") else "light")
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        for pair in node.items:
            self._lighten(pair.key)
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            if part is None:
                self.write("None")
            else:
                self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def signature(self, node: Any, frame: Frame, extra_kwargs: Any = None) -> None:
        for spread in (node.dyn_args, node.dyn_kwargs):
            if spread is not None:
                self._wrapped[id(spread)] = "environment.spread("
        super().signature(node, frame, extra_kwargs)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is for HTML, and not for chat templates", node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is for HTML, and not for chat templates", node.lineno)

    def _lighten(self, node: nodes.Node, by: str = "light") -> None:
        is_constant = isinstance(node, nodes.Const) or (
            isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
        )
        if not is_constant:  # the price of the block covers the length of its constants
            self._wrapped[id(node)] = f"environment.{by}("


def _price(body: list[nodes.Node]) -> int:
    """Returns the price of running these nodes once, in units. Blocks inside these nodes pay for themselves."""
    price, left = _STEP, list(body)
    while left:
        node = left.pop()
        price += _NODE
        if isinstance(node, nodes.TemplateData):
            price += len(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            price += len(node.value)
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                left.append(value)
            elif isinstance(value, list) and name not in ("body", "else_"):
                left.extend(item for item in value if isinstance(item, nodes.Node))
    return price
