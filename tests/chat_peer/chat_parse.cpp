// llama.cpp's parse of given texts: reads lines of JSON, writes one for each.
//
// In:  {"template": jinja2, "text": the generated text, "tools": OpenAI's, "parallel": bool, "reasoning": bool,
//       "tool_choice": "auto" | "required" | "none"}
// Out: {"content", "reasoning_content", "tool_calls": [{"name", "arguments", "id"}], "prompt", "format"}, or {"error"}
#include "chat.h"
#include "common.h"
#include "json.h"
#include "log.h"

#include <iostream>
#include <string>

using json = common_json;

static json answer(const json & asked) {
    auto templates = common_chat_templates_ptr(
        common_chat_templates_init(nullptr, asked.at("template").get<std::string>()));
    common_chat_templates_inputs inputs;
    common_chat_msg              user;
    user.role                    = "user";
    user.content                 = "Hey there!";
    inputs.messages              = { user };
    inputs.add_generation_prompt = true;
    inputs.parallel_tool_calls   = asked.at("parallel").get<bool>();
    inputs.reasoning_format =
        asked.at("reasoning").get<bool>() ? COMMON_REASONING_FORMAT_AUTO : COMMON_REASONING_FORMAT_NONE;
    inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(asked.at("tool_choice").get<std::string>());
    inputs.tools       = common_chat_tools_parse_oaicompat(asked.at("tools"));

    auto                      params = common_chat_templates_apply(templates.get(), inputs);
    common_chat_parser_params how(params);
    how.reasoning_format = inputs.reasoning_format;
    if (!params.parser.empty()) {
        how.parser.load(params.parser);
    }
    auto parsed = common_chat_parse(asked.at("text").get<std::string>(), false, how);
    json calls  = json::array();
    for (const auto & call : parsed.tool_calls) {
        json made         = json::object();
        made["name"]      = call.name;
        made["arguments"] = call.arguments;
        made["id"]        = call.id;
        calls.push_back(made);
    }
    json out                 = json::object();
    out["content"]           = parsed.content;
    out["reasoning_content"] = parsed.reasoning_content;
    out["tool_calls"]        = calls;
    out["prompt"]            = params.prompt;
    out["generation_prompt"] = params.generation_prompt;
    out["format"]            = std::string(common_chat_format_name(params.format));
    return out;
}

int main() {
    common_log_set_verbosity_thold(-1);
    std::string line;
    while (std::getline(std::cin, line)) {
        json out = json::object();
        try {
            out = answer(json::parse(line));
        } catch (const std::exception & error) {
            out["error"] = std::string(error.what());
        }
        std::cout << out.dump() << std::endl;
    }
}
