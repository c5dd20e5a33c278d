// Splits text with the regular expressions of every pre-tokenizer as the patched llama.cpp does and with std::regex, and
// compares the words; then tokenizes long runs of one kind of character, which std::regex does not survive.
//
//   tokenizer_check LLAMA-VOCAB.CPP [TEXTS [LONG]]
//
// exit status 1 if words differ, or a long run takes more than linear time. LLAMA-VOCAB.CPP: that file of the patched
// source, for the names of the pre-tokenizers. TEXTS: random texts for each (default 20); LONG: characters of a long run
// (default 15000). Built with -ISRC, the src folder of the patched source, and linked with libllama, whose calls of
// unicode_regex_split come here.

#include <cassert>

// the patched source, under another name
#define unicode_regex_split unicode_regex_split_patched
#include "unicode.cpp"
#undef unicode_regex_split

#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <pthread.h>
#include <random>
#include <set>
#include <thread>

namespace {

std::atomic<bool> compare{ true };
std::atomic<long> n_compared{ 0 };
std::atomic<long> n_words{ 0 };
std::atomic<long> n_differ{ 0 };
std::string name_of_pre;
std::vector<std::string> expressions; // of the last text

void print(const char * title, const std::vector<std::string> & words) {
    printf("  %s:", title);
    for (const auto & word : words) {
        printf(" [%s]", word.c_str());
    }
    printf("\n");
}

} // namespace

// libllama's tokenizer calls this one
std::vector<std::string> unicode_regex_split(const std::string & text, const std::vector<std::string> & regex_exprs,
                                             bool byte_encode);
std::vector<std::string> unicode_regex_split(const std::string & text, const std::vector<std::string> & regex_exprs,
                                             bool byte_encode) {
    auto words = unicode_regex_split_patched(text, regex_exprs, byte_encode);
    if (compare) {
        expressions = regex_exprs;
        unicode_regex::in_use = false;
        const auto wanted = unicode_regex_split_patched(text, regex_exprs, byte_encode);
        unicode_regex::in_use = true;
        // each (instruction, position) once from the start: the way of texts that take many steps
        const auto patience = unicode_regex::patience;
        unicode_regex::patience = 0;
        const auto impatient = unicode_regex_split_patched(text, regex_exprs, byte_encode);
        unicode_regex::patience = patience;
        n_compared++;
        n_words += wanted.size();
        if (words != wanted || impatient != wanted) {
            if (n_differ++ < 20) {
                printf("%s differs\n", name_of_pre.c_str());
                print("std::regex", wanted);
                print("patched", words);
                print("impatient", impatient);
            }
        }
    }
    return words;
}

namespace {

struct ModelFree {
    void operator()(llama_model * p) const { llama_model_free(p); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelFree>;

// Byte-level BPE with these merges, its "weights" nothing: for vocab_only.
ModelPtr make_model(const std::string & pre, const std::string & path) {
    std::vector<std::string> tokens = { "<unk>" };
    for (int byte = 0; byte < 256; byte++) {
        tokens.push_back(unicode_byte_to_utf8(byte));
    }
    std::vector<std::string> merges;
    for (const char * pair :
         { "a a", "aa aa", "A A", "1 1", "! !", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "Ġ a", "' s", "Ã ©", "e r", "Ġ 1" }) {
        std::string joined = merges.emplace_back(pair);
        joined.erase(joined.find(' '), 1);
        tokens.push_back(joined);
    }
    std::vector<const char *> token_texts, merge_texts;
    for (const auto & token : tokens) {
        token_texts.push_back(token.c_str());
    }
    for (const auto & merge : merges) {
        merge_texts.push_back(merge.c_str());
    }
    std::vector<int32_t> types(tokens.size(), 1);

    gguf_context * file = gguf_init_empty();
    gguf_set_val_str(file, "general.architecture", "llama");
    gguf_set_val_str(file, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(file, "tokenizer.ggml.pre", pre.c_str());
    gguf_set_arr_str(file, "tokenizer.ggml.tokens", token_texts.data(), token_texts.size());
    gguf_set_arr_data(file, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
    gguf_set_arr_str(file, "tokenizer.ggml.merges", merge_texts.data(), merge_texts.size());
    gguf_set_val_u32(file, "tokenizer.ggml.bos_token_id", 0);
    gguf_set_val_u32(file, "tokenizer.ggml.eos_token_id", 0);
    gguf_write_to_file(file, path.c_str(), false);
    gguf_free(file);

    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    ModelPtr model(llama_model_load_from_file(path.c_str(), params));
    remove(path.c_str());
    return model;
}

std::vector<std::string> names_of_pre_tokenizers(const char * path) {
    std::ifstream in(path);
    const std::string source((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    const std::string before = "tokenizer_pre == \"";
    std::set<std::string> names;
    for (size_t at = 0; (at = source.find(before, at)) != std::string::npos;) {
        at += before.size();
        names.insert(source.substr(at, source.find('"', at) - at));
    }
    return { names.begin(), names.end() };
}

std::vector<llama_token> tokenize(const llama_model * model, const std::string & text) {
    std::vector<llama_token> tokens(3 * text.size() + 8); // a byte that is no UTF-8 becomes three
    const int n = llama_tokenize(llama_model_get_vocab(model), text.data(), text.size(), tokens.data(), tokens.size(),
                                 false, false);
    if (n < 0) {
        printf("llama_tokenize returned %d for %zu bytes\n", n, text.size());
        exit(1);
    }
    tokens.resize(n);
    return tokens;
}

// Pieces that the patterns tell apart, of every category, and some that they take as a whole.
const std::vector<std::vector<std::string>> PIECES = {
    { "a", "b", "e", "s", "t", "z", "A", "B", "Z" },
    { "é", "ß", "ñ", "À", "Ω", "ω", "Ж", "ж", "ǅ", "ʰ", "ª" },
    { "中", "国", "ぁ", "ァ", "ー", "한", "ㅎ", "ㄅ", "ㄱ", "ก", "ا", "ب", "क", "𠀀", "豈", "ꦀ", "ﬀ", "Ａ", "𐐀" },
    { "\u0301", "\u0308", "\u20e3", "\u064b", "\u093f", "\u0e31", "\ufe0f" },
    { "0", "1", "2", "9" },
    { "٣", "४", "²", "½", "Ⅷ", "①", "９", "𝟘" },
    { " ", "  ", "\t", "\n", "\r", "\r\n", "\v", "\f" },
    { "\u00a0", "\u0085", "\u1680", "\u2003", "\u2028", "\u2029", "\u3000", "\u200b", "\ufeff" },
    { "'", "’", "'s", "'S", "'t", "'re", "'VE", "'ll", "'d", "'m", "don't", "I'LL" },
    { "!", "?", ".", ",", "-", "_", "(", ")", "[", "]", "{", "}", "\\", "/", "\"", "#", "%", "&", "*", ":", ";", "@" },
    { "$", "+", "<", "=", ">", "^", "`", "|", "~" },
    { "。", "，", "、", "！", "…", "“", "”", "—", "«", "」", "۔", "،", "।" },
    { "€", "©", "™", "→", "∑", "😀", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪" },
    { "\x01", "\x1b", "\x7f", "\u0080", "\ue000", "\ufdd0", "\U000e0001", "\ufffd", std::string(1, '\0') },
    { "\xed\xa0\x80", "\xff", "\xc3", "\xe4\xb8", "\xf0\x9f\x98", "\x80", "\xc0\x80" },
    { "<sentinel:12>", "<sentinel:", "IMGIMGABZ", "IMGIMGABCDEZ", "IMGIMG", "<dna>", "\u2581" },
};

std::string random_text(std::mt19937_64 & random) {
    auto below = [&](size_t n) { return (size_t) (random() % n); };
    // few kinds, so that they meet more often
    std::vector<const std::vector<std::string> *> kinds;
    for (size_t k = 1 + below(5); k > 0; k--) {
        kinds.push_back(&PIECES[below(PIECES.size())]);
    }
    std::string text;
    for (size_t k = below(120); k > 0; k--) {
        const auto & kind = *kinds[below(kinds.size())];
        const auto & piece = kind[below(kind.size())];
        const size_t times = below(8) ? 1 : below(40) ? 1 + below(12) : 1 + below(600);
        for (size_t i = 0; i < times; i++) {
            text += piece;
        }
    }
    return text;
}

// every character, beside a letter and alone
std::vector<std::string> all_characters() {
    std::vector<std::string> texts(1);
    for (uint32_t c = 1; c < 0x110000; c++) {
        if (c >= 0x20000 && c % 64) {
            continue; // few kinds in the upper planes
        }
        texts.back() += unicode_cpt_to_utf8(c) + (c % 3 ? "" : c % 2 ? "a" : " 1");
        if (texts.back().size() > 2000) {
            texts.emplace_back();
        }
    }
    return texts;
}

// Constructs that no pattern of llama.cpp has today: lookaheads over loops, lazy loops, counted groups, empty matches.
const std::vector<std::string> PATTERNS = {
    "\\s+$",
    "(?=(\\d{3})+(?!\\d))",
    "a*b*c|a|b",
    "(a|ab)(c|bcd)*",
    "(?:a\\s*)+b|\\s",
    "a{2,4}?b|a",
    "(ab){1,2}c|ab",
    "(ab|a){2,}b",
    "x*",
    "(?=ab)a|b*",
    "(?!a*b)a|bb",
    "[^a]?(?=[ab])[^b]+a|.",
    "a+?b|\\w\\W",
    "(?:(?=a+b)a|b){1,3}c|\\d?",
    "(?=(a|ab)+c).|b$",
    "((a+b)*c|a)",
    "\\S{2,3}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}",
    "(?:a b*(?: a b*)*)+|b",
    "(?=(?:ab|a)+?c)a*|b+",
    "(?:a*b)*c|ab",
    "[a-b]{0,2}?c| ?[^\\sa]+[\\r\\n]*|\\s*[\\r\\n]+",
    "(a*)b{3}|(?!aa)a",
    "(?=a*b*c)a|(?=a*b)a|b",
    "(?!b*a*c)[ab]|(?=\\s*\\d)\\s",
    "(?=a*ab)a|ab|b",
    "(?=\\s*\\s1)\\s|\\s1|1",
};

void compare_patterns(int n_texts) {
    const std::vector<std::string> alphabets = { "ab", "abc", "abc \n1", "aaaab\t \r\nc1x2", "1 2 3" };
    std::mt19937_64 random(1);
    for (const auto & pattern : PATTERNS) {
        const std::wstring wide_pattern(pattern.begin(), pattern.end());
        if (!unicode_regex::find(pattern) || !unicode_regex::find(wide_pattern)) {
            printf("%s is not supported\n", pattern.c_str());
            n_differ++;
        }
        for (int k = 0; k < n_texts; k++) {
            const auto & alphabet = alphabets[random() % alphabets.size()];
            std::string text;
            for (size_t i = random() % (k % 50 ? 20 : 120); i > 0; i--) {
                text.append(random() % 5 ? 1 : 1 + random() % 8, alphabet[random() % alphabet.size()]);
            }
            std::vector<size_t> parts;
            for (size_t left = text.size(); left > 0; left -= parts.back()) {
                parts.push_back(random() % 3 ? left : 1 + random() % left);
            }
            const auto wanted = unicode_regex_split_stl(text, pattern, parts);
            bool same = unicode_regex_split_general(text, pattern, parts) == wanted;
            same &= unicode_regex_split_general(std::wstring(text.begin(), text.end()), wide_pattern, parts) == wanted;
            const auto patience = unicode_regex::patience;
            unicode_regex::patience = 0;
            same &= unicode_regex_split_general(text, pattern, parts) == wanted;
            unicode_regex::patience = patience;
            n_compared++;
            n_words += wanted.size();
            if (!same && n_differ++ < 20) {
                printf("%s differs for [%s]\n", pattern.c_str(), text.c_str());
            }
        }
    }
}

double seconds(const llama_model * model, const std::string & text) {
    const auto start = std::chrono::steady_clock::now();
    tokenize(model, text);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// std::regex needs it, with a sanitizer several times as much
void on_large_stack(const std::function<void()> & work) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t) 256 << 20);
    pthread_t thread;
    auto call = [](void * f) -> void * {
        (*(const std::function<void()> *) f)();
        return nullptr;
    };
    if (pthread_create(&thread, &attributes, call, (void *) &work) != 0) {
        printf("no thread with a stack of 256 MiB\n");
        exit(1);
    }
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
}

// [piece, last piece]
const std::vector<std::pair<std::string, std::string>> RUNS = {
    { "a", "" },       { "A", "" },    { "é", "" },  { "中", "" },  { "\u0301", "" }, { "a\u0301", "" },
    { "1", "" },       { "1", "a" },   { "٣", "" },  { " ", "" },   { " ", "a" },     { "\n", "" },
    { "\n", " a" },    { " \n", "a" }, { "\r", "" }, { "\t", "x" }, { "\u3000", "" }, { "\u3000", "a" },
    { "!", "" },       { "。", "" },   { "$", "" },  { "😀", "" },  { "a ", "" },     { "aA", "" },
    { "Aé", "A" },     { "'s", "" },   { "'", "" },  { "a1", "" },  { "\x01", "" },   { "<sentinel:1", "" },
    { "IMGIMGA", "" },
};

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: tokenizer_check LLAMA-VOCAB.CPP [TEXTS [LONG]]\n");
        return 2;
    }
    const int n_texts = argc > 2 ? atoi(argv[2]) : 20;
    const size_t n_long = argc > 3 ? atol(argv[3]) : 15000;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const auto names = names_of_pre_tokenizers(argv[1]);
    if (names.size() < 50) {
        fprintf(stderr, "%s names %zu pre-tokenizers only\n", argv[1], names.size());
        return 2;
    }
    const std::string path =
        "tokenizer_check." + std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + ".gguf";
    const auto characters = all_characters();
    on_large_stack([&] { compare_patterns(50 * n_texts); });
    std::set<std::vector<std::string>> seen;
    int loaded = 0, slow = 0;
    long cases = 0;
    for (const auto & name : names) {
        const ModelPtr model = make_model(name, path);
        if (!model) {
            printf("%s does not load\n", name.c_str());
            n_differ++;
            continue;
        }
        loaded++;
        name_of_pre = name;
        std::mt19937_64 random(loaded);
        on_large_stack([&] {
            for (int i = 0; i < n_texts; i++) {
                tokenize(model.get(), random_text(random));
            }
            for (size_t i = loaded % 10; i < characters.size(); i += n_texts < 1000 ? 10 : 1) {
                tokenize(model.get(), characters[i]);
            }
        });
        if (!seen.insert(expressions).second) {
            continue; // many names share their expressions
        }
        compare = false;
        for (const auto & [piece, last] : RUNS) {
            std::string text;
            for (size_t k = 0; k < n_long; k++) {
                text += piece;
            }
            const double once = seconds(model.get(), text + last);
            text += text;
            double twice = seconds(model.get(), text + last);
            if (twice > 3 * once + 0.2) {
                twice = std::min(twice, seconds(model.get(), text + last)); // others may use the machine, too
            }
            cases++;
            if (twice > 3 * once + 0.2) {
                slow++;
                printf("%s: %zu times [%s] take %.3f s, twice as many %.3f s\n", name.c_str(), n_long, piece.c_str(),
                       once, twice);
            }
        }
        // the programs are shared
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; t++) {
            threads.emplace_back(
                [&] { tokenize(model.get(), "one word's  12345 " + std::string(200, 'a') + "\n中文。"); });
        }
        for (auto & thread : threads) {
            thread.join();
        }
        compare = true;
    }
    const long failed = n_differ + slow;
    printf("%d pre-tokenizers, %ld texts with %ld words compared, %ld long runs\n", loaded, n_compared.load(),
           n_words.load(), cases);
    printf("%ld of %ld cases failed\n", failed, n_compared.load() + cases);
    llama_backend_free();
    return failed > 0 || n_compared < 1000;
}
