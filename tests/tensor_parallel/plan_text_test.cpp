#include "tessera/tensor_parallel/detail/plan_text.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/any_placement.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>

namespace tessera {
namespace {

using testing::any_placement;
using testing::error_message;

TEST(PlanText, ParsesAPlan) {
  const auto plan = parse_plan(R"(
# Llama, with sequence parallelism
tok_embeddings = rowwise(input=R, output=S(1))
layers.*       = prepare_input(from=[S(1), _], to=[R, _], local=true)   # the second is a mask
layers.*.attn.w[qkv]=colwise( block = 64 )
norm = sequence
"" = prepare_output(from=S(-1), to=R,)

output = colwise(input=S(1), output=S(-1), local=false, sections=[8, 4]))");
  EXPECT_EQ(
      plan,
      (Plan{{"tok_embeddings", RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(1)}},
            {"layers.*", PrepareModuleInput{.input_layouts = {Shard(1), std::nullopt},
                                            .desired_input_layouts = {Replicate(), std::nullopt},
                                            .use_local_output = true}},
            {"layers.*.attn.w[qkv]", ColwiseParallel{.block = 64}},
            {"norm", SequenceParallel()},
            {"", PrepareModuleOutput{.output_layouts = Shard(-1), .desired_output_layouts = Replicate()}},
            {"output", ColwiseParallel{.input_layouts = Shard(1), .use_local_output = false, .sections = {8, 4}}}}));
  EXPECT_EQ(parse_plan("a = colwise\r\n\r\nb = rowwise()\r\n"),
            (Plan{{"a", ColwiseParallel()}, {"b", RowwiseParallel()}}));
  EXPECT_TRUE(parse_plan("").empty());
  EXPECT_EQ(parse_style(" sequence(dim=-2) "), Style(SequenceParallel{.sequence_dim = -2}));
}

TEST(PlanText, PrintsAPlan) {
  const Plan plan = {
      {"layers.*.up", ColwiseParallel()}, {"", SequenceParallel{.sequence_dim = 0}}, {"a b", RowwiseParallel()}};
  EXPECT_EQ(to_string(plan), R"(layers.*.up = colwise
""          = sequence(dim=0)
"a b"       = rowwise
)");
}

TEST(PlanText, ErrorsContainThePositionAndWhatIsExpected) {
  const std::pair<const char*, const char*> kBad[] = {
      {"a = colwise\nb = colwize",
       "plan, line 2, column 5: found 'colwize'; did you mean 'colwise' or 'rowwise'? styles are colwise, "
       "rowwise, sequence, prepare_input, prepare_output, prepare_input_output"},
      {"a colwise", "plan, line 1, column 3: found 'colwise'; write = and a style"},
      {"a", "line 1, column 2: the line ends; write = and a style"},
      {"a = ", "column 5: the line ends; styles are colwise"},
      {"= colwise", "column 1: found '='; write a pattern; \"\" is the root module"},
      {"a = colwise rowwise", "column 13: found 'rowwise'; nothing but a # comment follows a style"},
      {"a = colwise(outputs=R)",
       "column 13: found 'outputs'; parameters of colwise are input, output, local, block, sections"},
      {"a = sequence(block=4)", "column 14: found 'block'; parameters of sequence are dim, local"},
      {"a = colwise(output=Q)", "column 20: 'Q' is"},
      {"a = colwise(output R)", "column 20: found 'R'; write ="},
      {"a = colwise(local=yes)", "column 19: found 'yes'; write true or false"},
      {"a = colwise(block=four)", "column 19: found 'four'; write a number"},
      {"a = colwise(block=4 8)", "column 21: found '8'; write , or )"},
      {"a = colwise(block=4", "column 20: the line ends; write , or )"},
      {"a = colwise(block=4, block=8)", "column 22: 'block' is given twice"},
      {"a = colwise(block=0)", "column 5: colwise: block=0"},
      {"a = prepare_input(from=[S(1), R], to=R)", "column 5: prepare_input: from has 2 layouts and to has 1"},
      {"a = prepare_input(from=[S(1) R], to=R)", "column 30: found 'R'; write , or ]"},
      {"a = colwise # first\n\na = rowwise", "line 3, column 1: 'a' already has a style, in line 1"},
      {"\"a = colwise", "column 1: the quote is not closed"},
      {"\"\\a\" = colwise", "column 1: in quotes a \\ is followed by"},
  };
  for (const auto& bad : kBad)
    EXPECT_CONTAINS(error_message<UsageError>([&] { parse_plan(bad.first); }), bad.second) << "\nin: " << bad.first;
  EXPECT_CONTAINS(error_message<UsageError>([] { parse_style("colwise, rowwise"); }),
                  "column 8: found ','; nothing follows");
}

Layouts any_layouts(size_t size) {
  Layouts layouts;
  for (size_t i = 0; i < size; i++)
    layouts.each.push_back(*rc::gen::inRange(0, 4) == 0 ? std::nullopt : std::optional(any_placement()));
  return layouts;
}

// Valid desired layouts for these layouts.
Layouts desired_for(const Layouts& given) {
  using Maybe = std::optional<Placement>;
  Layouts layouts;
  for (const auto& one : given.each)
    layouts.each.push_back(!one ? Maybe() : *rc::gen::element(one, Maybe(Replicate()), Maybe(Shard(-1)), Maybe()));
  return layouts;
}

Sections any_sections() {
  if (*rc::gen::arbitrary<bool>()) return Sections(*rc::gen::inRange<int64_t>(1, 9));
  return Sections(*rc::gen::nonEmpty(rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(1, 4096))));
}

Style any_style() {
  const auto flag = *rc::gen::arbitrary<bool>(), other_flag = *rc::gen::arbitrary<bool>();
  const auto block = *rc::gen::inRange<int64_t>(1, 128), dim = *rc::gen::inRange<int64_t>(-8, 8);
  const auto in = any_layouts(*rc::gen::inRange<size_t>(1, 4)), out = any_layouts(*rc::gen::inRange<size_t>(1, 4));
  switch (*rc::gen::inRange(0, 6)) {
    case 0:
      return ColwiseParallel{any_placement(), *rc::gen::element(Replicate(), Shard(-1), Shard(1)), flag, block,
                             any_sections()};
    case 1:
      return RowwiseParallel{any_placement(), any_placement(), flag, block};
    case 2:
      return SequenceParallel{dim, flag};
    case 3:
      return PrepareModuleInput{in, desired_for(in), flag};
    case 4:
      return PrepareModuleOutput{out, desired_for(out), flag};
    default:
      return PrepareModuleInputOutput{in, desired_for(in), flag, out, desired_for(out), other_flag};
  }
}

TEST(PlanText, ParsesWhatItPrints) {
  EXPECT_TRUE(rc::check("parse(print(plan)) == plan", [] {
    Plan plan;
    const auto size = *rc::gen::inRange(0, 5);
    for (int i = 0; i < size; i++) {
      const auto pattern = *rc::gen::oneOf(
          rc::gen::arbitrary<std::string>(),
          rc::gen::container<std::string>(rc::gen::elementOf(std::string("ab.*?[!-]\\ \t\n\r#=\"(,)_"))));
      if (!plan.find(pattern)) plan.add(pattern, any_style());
    }
    RC_LOG() << plan;
    RC_ASSERT(parse_plan(to_string(plan)) == plan);
  }));
}

TEST(PlanText, AnyTextIsAPlanOrAUsageError) {
  EXPECT_TRUE(rc::check("parse(text) returns a plan or throws UsageError", [] {
    const std::vector<std::string> kWords = {
        "a",       "=",    "colwise", "prepare_input", "(",        ")", "[", "]",  ",",  "_", "R", "S(",
        "P(norm,", "from", "to",      "block",         "sections", "4", "-", "\"", "\\", "#", " ", "\n"};
    std::string text;
    for (const auto& word : *rc::gen::container<std::vector<std::string>>(rc::gen::elementOf(kWords))) text += word;
    try {
      parse_plan(text);
    } catch (const UsageError&) {
    }
  }));
}

}  // namespace
}  // namespace tessera
