#pragma once

// Splits text with the regular expressions of the pre-tokenizers, as std::regex (ECMAScript) does, without its recursion
//
// std::regex calls itself for each character of a match: one long word overflows the stack. Here a pattern becomes a
// program for a backtracking machine with a stack on the heap, which matches what std::regex matches: the leftmost start,
// alternatives in their order, quantifiers greedy or lazy with backtracking. Time is linear in the text:
// - characters become few symbols (two characters that no set of the pattern tells apart are one)
// - a loop over one set is one frame, not one per character, and knows where its run ends and from where on its
//   continuation has failed
// - a branch that cannot begin with the next symbol is not tried
// - past a budget of steps, each (instruction, position) is tried only once
//
// Supported: alternatives, groups, (?=...), (?!...), sets, . $ \d \s \w and their opposites, * + ? {n} {n,} {n,m}, lazy
// or not. For other patterns find() returns nullptr: back-references, \b, ^, [:names:], loops over what may be empty.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace unicode_regex {

struct unsupported {};

// sorted ranges of characters, both ends included
using ranges = std::vector<std::pair<uint32_t, uint32_t>>;
// symbols, after the characters have become symbols
using symbols = std::array<uint8_t, 256>;

constexpr uint32_t INF = 0xFFFFFFFF;
constexpr uint32_t MAX_COUNT = 1024; // longest counted loop: its run is walked anew at each start
constexpr size_t MAX_INSTS = 20000;  // counted loops over more than one set are written out

// for checks, which compare with std::regex
inline bool in_use = true;     // else std::regex splits
inline uint64_t patience = 64; // steps for each symbol, until each (instruction, position) is tried only once

inline ranges complement(ranges r) {
    std::sort(r.begin(), r.end());
    ranges out;
    uint64_t next = 0;
    for (const auto & [lo, hi] : r) {
        if (lo > next) {
            out.emplace_back((uint32_t) next, lo - 1);
        }
        next = std::max(next, (uint64_t) hi + 1);
    }
    if (next <= INF) {
        out.emplace_back((uint32_t) next, INF);
    }
    return out;
}

struct node {
    enum kind_t { SET, EMPTY, CONCAT, ALTERNATIVES, LOOP, LOOK, END } kind = EMPTY;
    ranges chars;     // SET, before symbols
    symbols set = {}; // SET, after
    uint32_t min = 0; // LOOP
    uint32_t max = 0;
    bool greedy = true;
    bool negative = false; // LOOK
    std::vector<node> parts;

    bool nullable() const {
        switch (kind) {
            case SET: return false;
            case CONCAT: return std::all_of(parts.begin(), parts.end(), [](const node & n) { return n.nullable(); });
            case ALTERNATIVES:
                return std::any_of(parts.begin(), parts.end(), [](const node & n) { return n.nullable(); });
            case LOOP: return min == 0 || parts[0].nullable();
            default: return true;
        }
    }
};

class parser {
  public:
    explicit parser(const std::vector<uint32_t> & text) : text(text) {}

    node parse() {
        node n = alternatives();
        if (pos != text.size()) {
            throw unsupported();
        }
        return n;
    }

  private:
    const std::vector<uint32_t> & text;
    size_t pos = 0;

    bool more() const { return pos < text.size(); }
    bool at(uint32_t c) const { return more() && text[pos] == c; }
    bool take(uint32_t c) { return at(c) && ++pos; }

    uint32_t next() {
        if (!more()) {
            throw unsupported();
        }
        return text[pos++];
    }

    static node make_set(ranges chars) {
        node n;
        n.kind = node::SET;
        n.chars = std::move(chars);
        return n;
    }

    node alternatives() {
        node n;
        n.kind = node::ALTERNATIVES;
        do {
            n.parts.push_back(sequence());
        } while (take('|'));
        return n.parts.size() == 1 ? node(std::move(n.parts[0])) : n;
    }

    node sequence() {
        node n;
        n.kind = node::CONCAT;
        while (more() && !at('|') && !at(')')) {
            n.parts.push_back(quantified());
        }
        return n.parts.size() == 1 ? node(std::move(n.parts[0])) : n;
    }

    node quantified() {
        node n = atom();
        node loop;
        loop.kind = node::LOOP;
        if (take('*')) {
            loop.max = INF;
        } else if (take('+')) {
            loop.min = 1;
            loop.max = INF;
        } else if (take('?')) {
            loop.max = 1;
        } else if (take('{')) {
            loop.min = loop.max = number();
            if (take(',')) {
                loop.max = at('}') ? INF : number();
            }
            if (!take('}') || loop.max < loop.min) {
                throw unsupported();
            }
        } else {
            return n;
        }
        loop.greedy = !take('?');
        if (at('*') || at('+') || at('?') || at('{') || n.nullable()) {
            throw unsupported(); // a loop over a loop, or over nothing
        }
        loop.parts.push_back(std::move(n));
        return loop;
    }

    uint32_t number() {
        uint32_t n = 0;
        if (!more() || text[pos] < '0' || text[pos] > '9') {
            throw unsupported();
        }
        while (more() && text[pos] >= '0' && text[pos] <= '9') {
            n = n * 10 + (text[pos++] - '0');
            if (n > MAX_COUNT) {
                throw unsupported();
            }
        }
        return n;
    }

    node atom() {
        const uint32_t c = next();
        switch (c) {
            case '(': return group();
            case '[': return bracket();
            case '.': return make_set(complement({ { '\n', '\n' }, { '\r', '\r' } }));
            case '$': {
                node n;
                n.kind = node::END;
                return n;
            }
            case '\\': {
                ranges chars;
                escape(chars);
                return make_set(std::move(chars));
            }
            case '^':
            case '*':
            case '+':
            case '?':
            case '{':
            case ')': throw unsupported();
            default: return make_set({ { c, c } });
        }
    }

    node group() {
        node n;
        bool look = false;
        if (take('?')) {
            const uint32_t c = next();
            if (c != ':' && c != '=' && c != '!') {
                throw unsupported();
            }
            look = c != ':';
            n.negative = c == '!';
        }
        node inner = alternatives();
        if (!take(')')) {
            throw unsupported();
        }
        if (!look) {
            return inner;
        }
        if (inner.nullable()) {
            throw unsupported();
        }
        n.kind = node::LOOK;
        n.parts.push_back(std::move(inner));
        return n;
    }

    // what follows a backslash; true if it is one character
    bool escape(ranges & chars) {
        const uint32_t c = next();
        ranges found;
        switch (c) {
            case 'd':
            case 'D': found = { { '0', '9' } }; break;
            case 's':
            case 'S': found = { { '\t', '\r' }, { ' ', ' ' } }; break;
            case 'w':
            case 'W': found = { { '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' } }; break;
            case 't': return add(chars, '\t');
            case 'n': return add(chars, '\n');
            case 'v': return add(chars, '\v');
            case 'f': return add(chars, '\f');
            case 'r': return add(chars, '\r');
            default:
                // a letter or digit means something, or will
                if (c >= 128 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) {
                    throw unsupported();
                }
                return add(chars, c);
        }
        if (c < 'a') {
            found = complement(found);
        }
        chars.insert(chars.end(), found.begin(), found.end());
        return false;
    }

    static bool add(ranges & chars, uint32_t c) {
        chars.emplace_back(c, c);
        return true;
    }

    node bracket() {
        const bool negative = take('^');
        ranges chars;
        if (at(']')) {
            throw unsupported();
        }
        while (!take(']')) {
            const bool single = item(chars);
            if (!at('-') || (pos + 1 < text.size() && text[pos + 1] == ']')) {
                continue;
            }
            ++pos;
            if (!single || !item(chars)) {
                throw unsupported();
            }
            const uint32_t hi = chars.back().first;
            chars.pop_back();
            if (hi < chars.back().first) {
                throw unsupported();
            }
            chars.back().second = hi;
            if (at('-') && !(pos + 1 < text.size() && text[pos + 1] == ']')) {
                throw unsupported();
            }
        }
        return make_set(negative ? complement(std::move(chars)) : std::move(chars));
    }

    bool item(ranges & chars) {
        const uint32_t c = next();
        if (c == '\\') {
            return escape(chars);
        }
        if (c == '[' && (at(':') || at('.') || at('='))) {
            throw unsupported();
        }
        return add(chars, c);
    }
};

struct inst {
    enum op_t : uint8_t {
        SET,   // one symbol of `set`
        STAR,  // any number of them
        COUNT, // min to max of them
        SPLIT, // `next` first, then `other`
        PEEK,  // the next symbol is one of `set` (negative: is not, or there is none); nothing is consumed
        LOOK,  // `other` matches here (negative: does not); nothing is consumed
        END,   // the text ends here
        ACCEPT,
    } op;
    bool greedy = true;
    bool negative = false;
    uint32_t set = 0;
    uint32_t min = 0;
    uint32_t max = 0;
    uint32_t next = 0;
    uint32_t other = 0;
    uint32_t first = INF;  // set of symbols that `next` must begin with; INF: any, or nothing at all
    uint32_t first2 = INF; // the same for `other`
    uint32_t slot = 0;     // number among the instructions with a choice
};

class program {
  public:
    program(const std::vector<uint32_t> & pattern, uint32_t n_chars) : n_chars(n_chars) {
        node root = parser(pattern).parse();
        make_symbols(root);
        simplify(root);
        start = compile(root, emit(inst::ACCEPT));
        for (inst & i : insts) {
            i.first = first_of(i.next);
            if (i.op == inst::SPLIT) {
                i.first2 = first_of(i.other);
            }
            if (i.op == inst::SPLIT || i.op == inst::STAR || i.op == inst::COUNT) {
                i.slot = n_slots++;
            }
        }
        first = first_of(start);
    }

    // the lengths of the matches and of what lies between them, for each part of the text
    template <typename CharT>
    std::vector<size_t> split(const std::basic_string<CharT> & text, const std::vector<size_t> & offsets) const;

  private:
    friend class machine;

    const uint32_t n_chars; // characters are below this
    std::vector<inst> insts;
    std::vector<symbols> sets;
    uint32_t start = 0;
    uint32_t first = INF;
    uint32_t n_slots = 0;

    std::vector<uint8_t> low;                       // symbol of each character below low.size()
    std::vector<std::pair<uint32_t, uint8_t>> high; // first character and symbol of each range

    uint8_t symbol(uint32_t c) const {
        if (c < low.size()) {
            return low[c];
        }
        auto it = std::upper_bound(high.begin(), high.end(), c, [](uint32_t v, const auto & r) { return v < r.first; });
        return (--it)->second;
    }

    static void collect(node & n, std::vector<node *> & found) {
        if (n.kind == node::SET) {
            found.push_back(&n);
        }
        for (node & part : n.parts) {
            collect(part, found);
        }
    }

    void make_symbols(node & root) {
        std::vector<node *> nodes;
        collect(root, nodes);
        std::vector<uint32_t> bounds = { 0 };
        for (const node * n : nodes) {
            for (const auto & [lo, hi] : n->chars) {
                bounds.push_back(lo);
                if (hi != INF) {
                    bounds.push_back(hi + 1);
                }
            }
        }
        std::sort(bounds.begin(), bounds.end());
        bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());

        std::map<std::vector<bool>, uint8_t> known;
        for (const uint32_t lo : bounds) {
            std::vector<bool> in(nodes.size());
            for (size_t i = 0; i < nodes.size(); ++i) {
                const ranges & chars = nodes[i]->chars;
                in[i] = std::any_of(chars.begin(), chars.end(),
                                    [lo](const auto & r) { return r.first <= lo && lo <= r.second; });
            }
            if (known.size() == 256 && known.find(in) == known.end()) {
                throw unsupported();
            }
            const uint8_t s = known.emplace(in, (uint8_t) known.size()).first->second;
            high.emplace_back(lo, s);
            for (size_t i = 0; i < nodes.size(); ++i) {
                nodes[i]->set[s] |= in[i];
            }
        }
        std::vector<uint8_t> table(std::min<uint32_t>(n_chars, 0x10000));
        for (uint32_t c = 0; c < table.size(); ++c) {
            table[c] = symbol(c);
        }
        low = std::move(table);
    }

    // lookahead at one set, then another set: what is in both; alternatives that are all sets: their union
    static void simplify(node & n) {
        for (node & part : n.parts) {
            simplify(part);
        }
        if (n.kind == node::CONCAT) {
            for (size_t i = 0; i + 1 < n.parts.size();) {
                node & look = n.parts[i];
                node & then = n.parts[i + 1];
                if (look.kind != node::LOOK || look.parts[0].kind != node::SET || then.kind != node::SET) {
                    ++i;
                    continue;
                }
                for (size_t s = 0; s < then.set.size(); ++s) {
                    then.set[s] &= look.parts[0].set[s] != look.negative;
                }
                n.parts.erase(n.parts.begin() + i);
            }
            if (n.parts.size() == 1) {
                node only = std::move(n.parts[0]);
                n = std::move(only);
            }
        } else if (n.kind == node::ALTERNATIVES) {
            if (std::all_of(n.parts.begin(), n.parts.end(), [](const node & p) { return p.kind == node::SET; })) {
                node all;
                all.kind = node::SET;
                for (const node & part : n.parts) {
                    for (size_t s = 0; s < all.set.size(); ++s) {
                        all.set[s] |= part.set[s];
                    }
                }
                n = std::move(all);
            }
        }
    }

    uint32_t set_index(const symbols & set) {
        const auto it = std::find(sets.begin(), sets.end(), set);
        if (it != sets.end()) {
            return it - sets.begin();
        }
        sets.push_back(set);
        return sets.size() - 1;
    }

    uint32_t emit(inst::op_t op, uint32_t next = 0, uint32_t set = 0) {
        if (insts.size() == MAX_INSTS) {
            throw unsupported();
        }
        inst i;
        i.op = op;
        i.next = next;
        i.set = set;
        insts.push_back(i);
        return insts.size() - 1;
    }

    uint32_t emit_split(uint32_t a, uint32_t b, bool in_order) {
        const uint32_t pc = emit(inst::SPLIT, in_order ? a : b);
        insts[pc].other = in_order ? b : a;
        return pc;
    }

    // instructions for n, then on to next; returns the first
    uint32_t compile(const node & n, uint32_t next) {
        switch (n.kind) {
            case node::EMPTY: return next;
            case node::SET: return emit(inst::SET, next, set_index(n.set));
            case node::END: return emit(inst::END, next);
            case node::CONCAT:
                for (size_t i = n.parts.size(); i-- > 0;) {
                    next = compile(n.parts[i], next);
                }
                return next;
            case node::ALTERNATIVES: {
                uint32_t pc = compile(n.parts.back(), next);
                for (size_t i = n.parts.size() - 1; i-- > 0;) {
                    pc = emit_split(compile(n.parts[i], next), pc, true);
                }
                return pc;
            }
            case node::LOOK: {
                const node & inner = n.parts[0];
                uint32_t pc;
                if (inner.kind == node::SET) {
                    pc = emit(inst::PEEK, next, set_index(inner.set));
                } else {
                    const uint32_t body = compile(inner, emit(inst::ACCEPT));
                    pc = emit(inst::LOOK, next);
                    insts[pc].other = body;
                }
                insts[pc].negative = n.negative;
                return pc;
            }
            case node::LOOP: return compile_loop(n, next);
        }
        return next;
    }

    uint32_t compile_loop(const node & n, uint32_t next) {
        const node & body = n.parts[0];
        if (body.kind == node::SET) {
            const uint32_t set = set_index(body.set);
            if (n.max == INF) {
                next = emit(inst::STAR, next, set);
            } else if (n.max > n.min) {
                next = emit(inst::COUNT, next, set);
                insts[next].max = n.max - n.min;
            }
            insts[next].greedy = n.max == n.min ? insts[next].greedy : n.greedy;
            if (n.min == 1) {
                return emit(inst::SET, next, set);
            }
            if (n.min > 1) {
                next = emit(inst::COUNT, next, set);
                insts[next].min = insts[next].max = n.min;
            }
            return next;
        }
        if (n.max == INF) {
            const uint32_t loop = emit(inst::SPLIT);
            const uint32_t again = compile(body, loop);
            insts[loop].next = n.greedy ? again : next;
            insts[loop].other = n.greedy ? next : again;
            next = loop;
        } else {
            const uint32_t done = next;
            for (uint32_t i = n.min; i < n.max; ++i) {
                next = emit_split(compile(body, next), done, n.greedy);
            }
        }
        for (uint32_t i = 0; i < n.min; ++i) {
            next = compile(body, next);
        }
        return next;
    }

    uint32_t first_of(uint32_t pc) {
        symbols found = {};
        std::vector<bool> seen(insts.size());
        std::vector<uint32_t> todo = { pc };
        while (!todo.empty()) {
            const uint32_t at = todo.back();
            todo.pop_back();
            if (seen[at]) {
                continue;
            }
            seen[at] = true;
            const inst & i = insts[at];
            switch (i.op) {
                case inst::SPLIT:
                    todo.push_back(i.next);
                    todo.push_back(i.other);
                    break;
                case inst::SET:
                case inst::STAR:
                case inst::COUNT:
                    for (size_t s = 0; s < found.size(); ++s) {
                        found[s] |= sets[i.set][s];
                    }
                    if (i.op != inst::SET && i.min == 0) {
                        todo.push_back(i.next);
                    }
                    break;
                default: return INF;
            }
        }
        return set_index(found);
    }
};

// runs a program over one part of the text
class machine {
  public:
    machine(const program & prog, const uint8_t * text, uint32_t n)
        : p(prog), text(text), n(n), budget(patience * ((uint64_t) n + 64)) {
        loops.resize(p.n_slots);
    }

    // the leftmost match from `from` on
    bool search(uint32_t from, uint32_t & begin, uint32_t & end) {
        for (uint32_t at = from; at < n; ++at) {
            if (p.first != INF && !p.sets[p.first][text[at]]) {
                continue;
            }
            if (match(at, end)) {
                begin = at;
                return true;
            }
        }
        begin = n;
        return p.first == INF && match(n, end);
    }

    // a match that begins here; not_empty: as std::regex_constants::match_not_null
    bool match(uint32_t at, uint32_t & end, bool not_empty = false) {
        floor = not_empty ? at + 1 : 0;
        const bool found = run(p.start, at, true);
        if (over) {
            over = false;
            once = true;
            tried.assign(bits(), 0);
            won.assign(bits(), 0);
            stack.clear();
            return match(at, end, not_empty);
        }
        end = result;
        return found;
    }

  private:
    struct frame {
        uint32_t pc;   // instruction to go on with, or whose loop to shorten, or that was tried
        uint32_t at;   // position
        uint32_t low;  // shortest end of the loop; LATER and TRIED else
        uint32_t high; // where it ended first
    };
    static constexpr uint32_t LATER = INF;     // the other branch
    static constexpr uint32_t TRIED = INF - 1; // marks the way to here

    // of a loop over one set: the last run, and the part of it after which its continuation failed
    struct loop {
        uint32_t begin = 1, end = 0;
        uint32_t fail_begin = 1, fail_end = 0;
    };

    const program & p;
    const uint8_t * const text;
    const uint32_t n;
    const uint64_t budget;

    std::vector<frame> stack;
    std::vector<loop> loops;
    uint64_t steps = 0;
    uint32_t floor = 0; // a match must end here or later
    uint32_t result = 0;
    bool once = false; // each instruction with a choice once at each position
    bool over = false; // the budget is spent: begin again, with `once`
    std::vector<uint64_t> tried;
    std::vector<uint64_t> won; // within lookaheads

    size_t bits() const { return ((size_t) p.n_slots * (n + (size_t) 1) + 63) / 64; }
    size_t bit(uint32_t slot, uint32_t at) const { return (size_t) slot * (n + (size_t) 1) + at; }
    static bool get(const std::vector<uint64_t> & v, size_t i) { return v[i / 64] >> (i % 64) & 1; }
    static void set(std::vector<uint64_t> & v, size_t i) { v[i / 64] |= (uint64_t) 1 << (i % 64); }

    bool in(uint32_t set, uint32_t at) const { return at < n && p.sets[set][text[at]]; }
    bool may(uint32_t first, uint32_t at) const { return first == INF || in(first, at); }

    // top: the whole pattern; else a lookahead, whose own frames are gone when this returns
    bool run(uint32_t pc, uint32_t at, bool top) {
        const size_t base = stack.size();
        for (;;) {
            if (steps++ > budget && !once) {
                over = true;
                return false;
            }
            const inst & i = p.insts[pc];
            bool ok = true;
            if (once && (i.op == inst::SPLIT || i.op == inst::STAR || i.op == inst::COUNT)) {
                const size_t b = bit(i.slot, at);
                if (!get(tried, b)) {
                    set(tried, b);
                    stack.push_back({ pc, at, TRIED, 0 });
                } else if (get(won, b)) {
                    return success(base, at, top);
                } else if (!back(base, pc, at)) {
                    return false;
                } else {
                    continue;
                }
            }
            switch (i.op) {
                case inst::SET:
                    ok = in(i.set, at);
                    ++at;
                    pc = i.next;
                    break;
                case inst::SPLIT:
                    if (!may(i.first, at)) {
                        pc = i.other;
                    } else {
                        if (may(i.first2, at)) {
                            stack.push_back({ i.other, at, LATER, 0 });
                        }
                        pc = i.next;
                    }
                    break;
                case inst::STAR:
                    if (once || !i.greedy) {
                        const bool more = in(i.set, at);
                        if (i.greedy && more) {
                            if (may(i.first, at)) {
                                stack.push_back({ i.next, at, LATER, 0 });
                            }
                            ++at;
                        } else {
                            if (more) {
                                lazy(pc, at);
                            }
                            pc = i.next;
                        }
                    } else {
                        ok = star(i, pc, at);
                    }
                    break;
                case inst::COUNT: ok = count(i, pc, at); break;
                case inst::PEEK:
                    ok = in(i.set, at) != i.negative;
                    pc = i.next;
                    break;
                case inst::LOOK:
                    ok = run(i.other, at, false) != i.negative;
                    if (over) {
                        return false;
                    }
                    pc = i.next;
                    break;
                case inst::END:
                    ok = at == n;
                    pc = i.next;
                    break;
                case inst::ACCEPT:
                    if (!top || at >= floor) {
                        return success(base, at, top);
                    }
                    ok = false;
                    break;
            }
            if (!ok && !back(base, pc, at)) {
                return false;
            }
        }
    }

    // one more symbol of a lazy loop, later
    void lazy(uint32_t pc, uint32_t at) { stack.push_back({ pc, at + 1, LATER, 0 }); }

    bool star(const inst & i, uint32_t & pc, uint32_t & at) {
        loop & l = loops[i.slot];
        if (at < l.begin || at > l.end) {
            uint32_t e = at;
            while (in(i.set, e)) {
                ++e;
            }
            steps += e - at;
            l.begin = at;
            l.end = e;
        }
        uint32_t high = l.end;
        if (l.fail_begin <= l.fail_end && l.fail_end == l.end) {
            if (l.fail_begin <= at) {
                return false;
            }
            high = l.fail_begin - 1;
        }
        if (high > at) {
            stack.push_back({ pc, high + 1, at, l.end });
            return false; // back() takes the frame up
        }
        at = high;
        pc = i.next;
        return true;
    }

    bool count(const inst & i, uint32_t & pc, uint32_t & at) {
        uint32_t most = 0;
        const uint32_t limit = i.greedy ? i.max : i.min;
        while (most < limit && in(i.set, at + most)) {
            ++most;
        }
        steps += most;
        if (most < i.min) {
            return false;
        }
        if (i.greedy) {
            for (uint32_t k = i.min; k < most; ++k) {
                if (may(i.first, at + k)) {
                    stack.push_back({ i.next, at + k, LATER, 0 });
                }
            }
        } else {
            uint32_t all = most;
            while (all < i.max && in(i.set, at + all)) {
                ++all;
            }
            for (uint32_t k = all; k > most; --k) {
                stack.push_back({ i.next, at + k, LATER, 0 });
            }
        }
        at += most;
        pc = i.next;
        return true;
    }

    // to the last choice that has something left
    bool back(size_t base, uint32_t & pc, uint32_t & at) {
        while (stack.size() > base) {
            frame & f = stack.back();
            if (f.low == TRIED) {
                stack.pop_back();
            } else if (f.low == LATER) {
                pc = f.pc;
                at = f.at;
                stack.pop_back();
                return true;
            } else {
                const inst & i = p.insts[f.pc];
                uint32_t next = f.at;
                while (next > f.low && !may(i.first, next - 1)) {
                    --next;
                }
                steps += f.at - next;
                if (next > f.low) {
                    f.at = at = next - 1;
                    pc = i.next;
                    return true;
                }
                loops[i.slot].fail_begin = f.low;
                loops[i.slot].fail_end = f.high;
                stack.pop_back();
            }
        }
        return false;
    }

    bool success(size_t base, uint32_t at, bool top) {
        for (size_t k = base; k < stack.size(); ++k) {
            const frame & f = stack[k];
            if (f.low == TRIED) {
                const size_t b = bit(p.insts[f.pc].slot, f.at);
                if (top) {
                    tried[b / 64] &= ~((uint64_t) 1 << (b % 64)); // another search may begin here
                } else {
                    set(won, b);
                }
            } else if (f.low != LATER && !top && f.at < f.high) {
                loops[p.insts[f.pc].slot].fail_begin = f.at + 1;
                loops[p.insts[f.pc].slot].fail_end = f.high;
            }
        }
        stack.resize(base);
        result = at;
        return true;
    }
};

template <typename CharT>
std::vector<size_t> program::split(const std::basic_string<CharT> & text, const std::vector<size_t> & offsets) const {
    std::vector<uint8_t> syms(text.size());
    for (size_t i = 0; i < text.size(); ++i) {
        syms[i] = symbol((uint32_t) (typename std::make_unsigned<CharT>::type) text[i]);
    }
    std::vector<size_t> lengths;
    lengths.reserve(offsets.size());
    size_t start_of_part = 0;
    for (const size_t n : offsets) {
        machine m(*this, syms.data() + start_of_part, (uint32_t) n);
        uint32_t from = 0, last = 0, begin = 0, end = 0;
        // in the order of std::regex_iterator
        while (m.search(from, begin, end)) {
            if (begin > last) {
                lengths.push_back(begin - last);
            }
            lengths.push_back(end - begin);
            last = from = end;
            if (begin == end) {
                if (end == n) {
                    break;
                }
                if (m.match(end, end, true)) {
                    lengths.push_back(end - begin);
                    last = from = end;
                } else {
                    end = begin;
                    from = begin + 1;
                }
            }
        }
        if (last < n) {
            lengths.push_back(n - last);
        }
        start_of_part += n;
    }
    return lengths;
}

// the program for a pattern, made once; nullptr if it is not supported
template <typename CharT> std::shared_ptr<const program> find(const std::basic_string<CharT> & pattern) {
    static std::mutex mutex;
    static std::map<std::basic_string<CharT>, std::shared_ptr<const program>> known;
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = known.find(pattern);
    if (it != known.end()) {
        return it->second;
    }
    std::shared_ptr<const program> made;
    try {
        std::vector<uint32_t> chars;
        for (const CharT c : pattern) {
            chars.push_back((uint32_t) (typename std::make_unsigned<CharT>::type) c);
        }
        made = std::make_shared<const program>(chars, sizeof(CharT) == 1 ? 0x100 : INF);
    } catch (const unsupported &) {
    }
    return known[pattern] = made;
}

} // namespace unicode_regex
