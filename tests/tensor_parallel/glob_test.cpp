#include "tessera/tensor_parallel/detail/glob.h"

#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera {
namespace {

using Names = std::vector<std::string>;

const Names kNames = {"",    "a",   "b",   "c",   "d",    "A",     "-",    "^",   "!",    "]",      "[",   "[a",
                      "a[",  "\\",  "\\*", "\\a", "*",    "?",     ":a]",  "aab", "abab", "ababab", "ab",  "abc",
                      "axb", "a.b", ".b",  ".a",  "net1", "net12", "1net", "wq",  "wo",   "w",      "a]b", "\\]b",
                      "ac",  "-c",  "x]",  "x-",  "x^",   "e",     "/",    "[]",  "[!]",  "0"};
Names all_but(const Names& excluded) {
  Names rest;
  for (const auto& name : kNames)
    if (std::ranges::count(excluded, name) == 0) rest.push_back(name);
  return rest;
}

const struct {
  const char* pattern;
  Names matches;
} kPatterns[] = {
    {"", {""}},
    {"*", all_but({})},
    {"**", all_but({})},
    {"?", {"a", "b", "c", "d", "A", "-", "^", "!", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"a", {"a"}},
    {"A", {"A"}},
    {"a*", {"a", "a[", "aab", "abab", "ababab", "ab", "abc", "axb", "a.b", "a]b", "ac"}},
    {"*a", {"a", "[a", "\\a", ".a"}},
    {"a*b", {"aab", "abab", "ababab", "ab", "axb", "a.b", "a]b"}},
    {"*.b", {"a.b", ".b"}},
    {"a?c", {"abc"}},
    {"[abc]", {"a", "b", "c"}},
    {"[a-c]", {"a", "b", "c"}},
    {"[!abc]", {"d", "A", "-", "^", "!", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"[!a-c]", {"d", "A", "-", "^", "!", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"[^a]", {"a", "^"}},
    {"[]a]", {"a", "]"}},
    {"[!]a]", {"b", "c", "d", "A", "-", "^", "!", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"[]", {"[]"}},
    {"[!]", {"[!]"}},
    {"[", {"["}},
    {"[a", {"[a"}},
    {"a[", {"a["}},
    {"[-a]", {"a", "-"}},
    {"[a-]", {"a", "-"}},
    {"[c-a]", {}},
    {"[!c-a]", {"a", "b", "c", "d", "A", "-", "^", "!", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"[a-c-e]", {"a", "b", "c", "-", "e"}},
    {"[--0]", {"-", "/", "0"}},
    {"[[]", {"["}},
    {"[[:alpha:]]", {"[]"}},
    {"[*]", {"*"}},
    {"[?]", {"?"}},
    {"\\*", {"\\", "\\*", "\\a", "\\]b"}},
    {"\\a", {"\\a"}},
    {"[\\]", {"\\"}},
    {"[a\\]b]", {}},
    {"*ab*ab", {"abab", "ababab"}},
    {"*a*b*c*", {"abc"}},
    {"net[0-9]", {"net1"}},
    {"net*", {"net1", "net12"}},
    {"*net", {"1net"}},
    {"[!n]*", all_but({"", "net1", "net12"})},
    {"w[qkv]", {"wq"}},
    {"w[!qkv]", {"wo"}},
    {"?*", all_but({""})},
    {"*?", all_but({""})},
    {"a**b", {"aab", "abab", "ababab", "ab", "axb", "a.b", "a]b"}},
    {"[!!]", {"a", "b", "c", "d", "A", "-", "^", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
    {"[a-]c", {"ac", "-c"}},
    {"x[]-a]", {"x]", "x^"}},
    {"[a!b]", {"a", "b", "!"}},
    {"[!-a]", {"b", "c", "d", "A", "^", "!", "]", "[", "\\", "*", "?", "w", "e", "/", "0"}},
};

// The expected matches are those of Python's fnmatch.fnmatchcase.
TEST(Glob, MatchesLikePythonsFnmatch) {
  for (const auto& expected : kPatterns)
    for (const auto& name : kNames)
      EXPECT_EQ(glob_matches(expected.pattern, name), std::ranges::count(expected.matches, name) == 1)
          << "pattern '" << expected.pattern << "', name '" << name << "'";
}

TEST(Glob, ManyStarsDoNotBacktrackExponentially) {
  std::string pattern, name(2000, 'a');
  for (int i = 0; i < 500; i++) pattern += "*a";
  EXPECT_TRUE(glob_matches(pattern, name));
  EXPECT_FALSE(glob_matches(pattern + "b", name));
}

// The names of named_modules() of a small transformer.
const Names kModel = {"",
                      "embed",
                      "layers",
                      "layers.0",
                      "layers.0.attn",
                      "layers.0.attn.wq",
                      "layers.0.attn.wk",
                      "layers.0.attn.wo",
                      "layers.1",
                      "layers.1.attn",
                      "layers.1.attn.wq",
                      "layers.1.attn.wk",
                      "layers.1.attn.wo",
                      "layers.10",
                      "layers.10.mlp",
                      "wq"};

TEST(Glob, PathsMatchLevelByLevel) {
  const struct {
    const char* pattern;
    Names matches;
  } kExpected[] = {
      {"", {""}},
      {"*", {"embed", "layers", "wq"}},
      {"layers.?", {"layers.0", "layers.1"}},
      {"layers.*", {"layers.0", "layers.1", "layers.10"}},
      {"layers.*.attn.w[qk]", {"layers.0.attn.wq", "layers.0.attn.wk", "layers.1.attn.wq", "layers.1.attn.wk"}},
      {"*.*.*.wo", {"layers.0.attn.wo", "layers.1.attn.wo"}},
      {"*.wq", {}},  // a star is one level, and the name wq has only one level
      {"layers.0.attn.wq.", {}},
      {".wq", {}},
      {"layers", {"layers"}},
  };
  for (const auto& [pattern, matches] : kExpected) EXPECT_EQ(matching_paths(pattern, kModel), matches) << pattern;
}

TEST(Glob, WhyUnmatchedNamesTheFirstLevelThatDoesNotMatch) {
  EXPECT_EQ(why_unmatched("layers.*.attn.wz", kModel),
            "no child of 'layers.0.attn' matches 'wz'; it has wq, wk, wo. "
            "Nearest names: layers.0.attn.wq, layers.0.attn.wk, layers.0.attn.wo");
  EXPECT_EQ(why_unmatched("embedd", kModel),
            "no child of the module matches 'embedd'; it has embed, layers, wq. Nearest names: embed");
  EXPECT_EQ(why_unmatched("wq.lora", kModel), "no child of 'wq' matches 'lora'; it has none.");
}

}  // namespace
}  // namespace tessera
