// JSON parser and printer: strict, as file headers and manifests need them.
#include "tessera/base/detail/json.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera {
namespace {

TEST(Json, PrintsWhatItParses) {
  for (const std::string text :
       {R"({"a":[1,-2,0.5,1e+300],"b":{"c":null,"d":[true,false]},"e":""})", R"([])", R"({})", R"("x")", R"([[],{}])",
        R"(9223372036854775807)", R"([1.0])", "\"\xc3\xa9\"", R"("a\"\\b\u000a")"})
    EXPECT_EQ(Json::parse(text, "it").dump(), text);
  EXPECT_EQ(Json::parse(" { \"a\" :\n[ 1 , 2 ] } \t", "it").dump(), R"({"a":[1,2]})");
}

TEST(Json, StringsAndNumbers) {
  EXPECT_EQ(Json::parse(R"("\u00e9\ud83d\ude00\n\/")", "it").text(), "\xc3\xa9\xf0\x9f\x98\x80\n/");
  EXPECT_EQ(Json::parse("[1, 2]", "it").numbers(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(*Json::parse("9223372036854775808", "it").get_if<double>(), 9223372036854775808.0);
  EXPECT_EQ(*Json::parse("1e2", "it").get_if<double>(), 100.0);
  const double third = 1.0 / 3;
  EXPECT_EQ(*Json::parse(Json(third).dump(), "it").get_if<double>(), third);
  EXPECT_ERROR(UsageError, Json(std::numeric_limits<double>::infinity()).dump(), "inf");
}

TEST(Json, SyntaxErrorsHaveTheByteOffset) {
  struct SyntaxError {
    std::string text, message;
  };
  const SyntaxError errors[] = {
      {"", "a value was expected at byte 0, and its end is there"},
      {"{", "'\"' was expected at byte 1, and its end is there"},
      {R"({"a" 1})", "':' was expected at byte 5, and '1' is there"},
      {R"({"a":1,})", "'\"' was expected at byte 7, and '}' is there"},
      {R"({"a":1 "b":2})", "'}' was expected at byte 7"},
      {R"({"a":1,"a":2})", "it has 'a' twice, the second time at byte 7"},
      {"[1,]", "a value was expected at byte 3, and ']' is there"},
      {"[1", "']' was expected at byte 2"},
      {"01", "a number without zeros in front"},
      {"1.", "a value was expected at byte 2"},
      {"-", "a value was expected at byte 1"},
      {"1e999", "a number in range"},
      {"nul", "a value was expected at byte 0, and 'n' is there"},
      {"1 2", "an end was expected at byte 2, and '2' is there"},
      {"\"a", " was expected at byte 2"},
      {"\"\n\"", "at byte 1, and byte 10 is there"},
      {R"("\x")", "an escape was expected at byte 2, and 'x' is there"},
      {R"("\u12")", "four hex digits"},
      {R"("\ud83dx")", "a pair of surrogates"},
      {R"("\ude00")", "a pair of surrogates"},
      {std::string(40, '['), "more than 16 "},
      {std::string("\0", 1), "and byte 0 is there"},
  };
  for (const auto& each : errors) EXPECT_ERROR(UsageError, Json::parse(each.text, "it"), each.message);
}

TEST(Json, TypeErrorsShowTheValue) {
  const auto json = Json::parse(R"({"a":[1,"x"],"b":1.5})", "it");
  EXPECT_ERROR(UsageError, json.at("c"), "there is no 'c'");
  EXPECT_ERROR(UsageError, json.at("a").numbers(), "expected, and \"x\" is there");
  EXPECT_ERROR(UsageError, json.at("b").number(), "expected, and 1.5 is there");
  EXPECT_ERROR(UsageError, json.at("b").at("c"), "an object was expected, and 1.5 is there");
}

}  // namespace
}  // namespace tessera
