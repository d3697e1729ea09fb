// Properties of all commands, flags and options of the program, from the tables that define them.
#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/train_config_file.h"
#include "tessera/cli/train_flags.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/plan.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

namespace tessera::cli {
namespace {

using testing::error_message;
using train::OptionInfo;
using train::TrainConfig;

struct TomlFile {
  explicit TomlFile(const std::string& text) { std::ofstream(path) << text; }
  ~TomlFile() { std::filesystem::remove(path); }
  const std::string path = c10::str("/tmp/tessera-options-", getpid(), ".toml");
};

// What `tessera train --print-config` prints and then reads.
TrainConfig read_back(const TrainConfig& config) {
  const TomlFile file(c10::str(config));
  TrainConfig read;
  read_train_config(read, file.path);
  return read;
}

// What the launcher passes to its ranks.
TrainConfig pass_as_flags(const TrainConfig& config) {
  CLI::App app;
  TrainFlags flags;
  flags.add_to(app);
  auto words = split_empty_values(flags_of(config));
  std::reverse(words.begin(), words.end());
  app.parse(std::move(words));
  return flags.config();
}

void expect_reads_back(const TrainConfig& config, const std::string& what) {
  EXPECT_TRUE(read_back(config) == config) << what << " in a file:\n" << config;
  EXPECT_TRUE(pass_as_flags(config) == config) << what << " as flags: " << c10::Join(" ", flags_of(config));
}

const std::vector<std::string> kNumbers{"-1e30",
                                        "-9223372036854775808",
                                        "-3",
                                        "-1",
                                        "-0.5",
                                        "0",
                                        "1e-320",
                                        "1e-5",
                                        "0.5",
                                        "1",
                                        "2",
                                        "7",
                                        "255",
                                        "65536",
                                        "1000000007",
                                        "9223372036854775807",
                                        "18446744073709551615",
                                        "1e18",
                                        "1e30",
                                        "99999999999999999999",
                                        "1e400",
                                        "nan",
                                        "inf",
                                        "-inf",
                                        "",
                                        " 1",
                                        "1 ",
                                        "+1",
                                        "0x10",
                                        "7x",
                                        "1_000",
                                        "ten"};
const std::vector<std::string> kTexts{"",
                                      " ",
                                      "a b",
                                      "-x",
                                      "--lr",
                                      "=",
                                      "a=b",
                                      "[1,2]",
                                      "{}",
                                      "%%",
                                      "\"q\"",
                                      "'q'",
                                      "\\",
                                      "back\\slash\\",
                                      "new\nline",
                                      "tab\there",
                                      "\x01\x1f\x7f",
                                      "#x",
                                      "\"\"\"",
                                      "\xc3\xa9\xf0\x9f\x98\x80",
                                      "true",
                                      "1e5",
                                      "C:\\new\\u0041",
                                      std::string(5000, 'x')};

TEST(Options, EveryNumberIsRefusedWithItsBoundOrReadsBack) {
  const TrainConfig defaults;
  int accepted = 0, refused = 0;
  train::visit_options(defaults, [&](const OptionInfo& info, const auto& current) {
    using T = std::remove_cvref_t<decltype(current)>;
    if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      EXPECT_TRUE(info.range || std::is_unsigned_v<T>) << info.key << " has no bounds";
      EXPECT_TRUE(!info.range || info.range->contains(static_cast<double>(current))) << info.key << ": the default";
      for (const auto& text : kNumbers) {
        auto config = defaults;
        const auto error = error_message<UsageError>([&] { train::set_option(config, info.key, text); });
        if (error == "nothing was thrown") {
          accepted++;
          expect_reads_back(config, c10::str(info.key, " = ", text));
          train::config_errors(config, 1);  // returns at once
          continue;
        }
        refused++;
        EXPECT_TRUE(config == defaults) << info.key;
        EXPECT_CONTAINS(error, c10::str(info.key, " is '", text, "'; write "));
        EXPECT_CONTAINS(error, info.range ? c10::str(*info.range) : "an integer");
      }
      for (const std::string huge : {"-1e30", "1e30", "nan", "inf", "9223372036854775807"})
        if (info.range)
          EXPECT_ERROR(UsageError, train::set_option(*std::make_unique<TrainConfig>(), info.key, huge), info.key);
      // A program can set the fields without set_option().
      auto config = defaults;
      train::visit_options(config, [&](const OptionInfo& other, auto& value) {
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, T>)
          if (std::string_view(other.key) == info.key) value = std::numeric_limits<T>::max();
      });
      if (info.range) EXPECT_ERROR(UsageError, train::check(config, 1), std::string(info.key), c10::str(*info.range));
    }
  });
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 500);
}

TEST(Options, EveryTextAndFlagReadsBack) {
  const TrainConfig defaults;
  train::visit_options(defaults, [&](const OptionInfo& info, const auto& current) {
    using T = std::remove_cvref_t<decltype(current)>;
    if constexpr (std::is_same_v<T, bool>) {
      auto config = defaults;
      train::set_option(config, info.key, current ? "false" : "true");
      expect_reads_back(config, info.key);
    } else if constexpr (std::is_same_v<T, std::string>) {
      EXPECT_ERROR(UsageError, train::set_option(*std::make_unique<TrainConfig>(), info.key, "a\xff"), "not UTF-8");
    }
  });
  for (const auto& text : kTexts) {  // in all text options at a time
    auto config = defaults;
    train::visit_options(defaults, [&](const OptionInfo& info, const auto& current) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(current)>, std::string>)
        train::set_option(config, info.key, text);
    });
    expect_reads_back(config, "'" + text + "'");
  }
}

TEST(Options, RandomConfigsReadBack) {
  std::mt19937_64 random(3);
  const auto pick = [&](const auto& all) { return all[random() % all.size()]; };
  for (int round = 0; round < 100; round++) {
    TrainConfig config;
    const TrainConfig defaults;
    train::visit_options(defaults, [&](const OptionInfo& info, const auto& current) {
      using T = std::remove_cvref_t<decltype(current)>;
      try {
        if constexpr (std::is_same_v<T, bool>)
          train::set_option(config, info.key, random() % 2 ? "true" : "false");
        else if constexpr (std::is_same_v<T, std::string>)
          train::set_option(config, info.key, pick(kTexts));
        else if constexpr (std::is_floating_point_v<T>)
          train::set_option(config, info.key, train::option_text(std::bit_cast<double>(random())));
        else
          train::set_option(config, info.key, pick(kNumbers));
      } catch (const UsageError&) {
      }
    });
    expect_reads_back(config, "a random config");
  }
}

std::unique_ptr<CLI::App> all_commands() {
  auto app = std::make_unique<CLI::App>("", "tessera");
  add_bench_command(*app), add_env_command(*app), add_opt_command(*app), add_plan_command(*app);
  add_run_command(*app, {"true"}), add_trace_command(*app), add_train_command(*app);
  return app;
}

bool is_number(const CLI::Option& option) {
  const auto type = option.get_type_name();
  return type.starts_with("INT") || type.starts_with("UINT") || type.starts_with("FLOAT");
}

// The options of TrainConfig are in groups of their own; the tests above are about them.
TEST(Options, EveryOtherNumberIsRefusedWithItsBound) {
  int count = 0;
  const auto app = all_commands();
  for (const auto* command : app->get_subcommands({}))
    for (const auto* option : command->get_options()) {
      if (!is_number(*option) || option->get_group() != "Options") continue;
      count++;
      for (const std::string value : {"-1e30", "-1", "1e30", "nan", "inf", "ten"}) {
        std::vector<std::string> words{value,
                                       option->get_name(false, true).substr(0, option->get_name(false, true).find(',')),
                                       command->get_name()};
        std::string message;
        try {
          all_commands()->parse(std::move(words));
        } catch (const CLI::ParseError& error) {
          message = error.what();
        }
        EXPECT_CONTAINS(message, "is not a number from ") << command->get_name() << " " << option->get_name();
        EXPECT_CONTAINS(message, value);
      }
    }
  EXPECT_GT(count, 12);
}

TEST(Options, NumbersAreTypedInHelp) {
  const auto app = all_commands();
  const auto* train = app->get_subcommand("train");
  struct TypedOption {
    std::string name, other_name, type, default_value;
  };
  for (const auto& expected : std::vector<TypedOption>{{"--steps", "--training.steps", "INT", "1000"},
                                                       {"--lr", "--optimizer.lr", "FLOAT", "0.001"},
                                                       {"--seed", "--training.seed", "UINT", "0"},
                                                       {"--model", "--model.name", "TEXT", "gpt-tiny"}}) {
    const auto* option = train->get_option(expected.name);
    EXPECT_EQ(option, train->get_option(expected.other_name));
    EXPECT_EQ(option->get_type_name(), expected.type) << expected.name;
    EXPECT_EQ(option->get_default_str(), expected.default_value) << expected.name;
  }
  EXPECT_CONTAINS(train->help(), "Number of training steps; from 1 to 1000000000");
}

std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

// A word with one letter changed, removed, added or exchanged with the next one.
std::string misspell(std::string word, std::mt19937_64& random) {
  const size_t first = word.find_first_not_of('-'), at = first + random() % (word.size() - first);
  const char letter = static_cast<char>('a' + random() % 26);
  switch (random() % 4) {
    case 0:
      word[at] = letter;
      break;
    case 1:
      word.erase(at, 1);
      break;
    case 2:
      word.insert(at, 1, letter);
      break;
    default:
      if (at + 1 < word.size()) std::swap(word[at], word[at + 1]);
  }
  return word;
}

TEST(Suggestions, EveryMisspelledCommandAndFlagHasOne) {
  std::mt19937_64 random(5);
  const auto app = all_commands();
  int count = 0;
  const auto expect_suggestion = [&](const std::vector<std::string>& words, const std::string& right) {
    const auto error = error_message<UsageError>([&] { check_arguments(*app, words); });
    EXPECT_CONTAINS(error, "did you mean ") << words.back();
    EXPECT_CONTAINS(error, "'" + right + "'") << words.back();
    count++;
  };
  std::vector<std::string> command_names;
  for (const auto* command : app->get_subcommands({})) command_names.push_back(command->get_name());
  for (auto* command : app->get_subcommands({})) {
    const auto name = command->get_name();
    for (int i = 0; i < 20; i++) {
      const auto wrong = misspell(name, random);
      if (wrong.empty() || std::ranges::count(command_names, wrong) > 0) continue;
      expect_suggestion({wrong}, name);
    }
    if (command->get_prefix_command()) continue;  // the flags are of another program
    for (const auto& flag : names_of(*command))
      for (int i = 0; i < 3; i++) {
        const auto wrong = misspell(flag, random);
        if (flag.size() < 4 || command->get_option_no_throw(wrong)) continue;
        expect_suggestion({name, wrong, "3"}, flag);
        expect_suggestion({name, wrong + "=3"}, flag);
      }
  }
  EXPECT_GT(count, 500);
  EXPECT_ERROR(UsageError, check_arguments(*app, {"qqqqqqqq"}),
               "unknown command 'qqqqqqqq' of tessera; see tessera --help");
  EXPECT_ERROR(UsageError, check_arguments(*app, {"train", "steps"}), "unknown argument 'steps'", "'--steps'");
}

TEST(Suggestions, AFlagGivenTwiceIsAnError) {
  const auto app = all_commands();
  for (auto* command : app->get_subcommands({})) {
    if (command->get_prefix_command()) continue;
    for (const auto* option : command->get_options()) {
      if (option->get_expected_max() > 1 || option->get_positional()) continue;
      const auto& names = names_of(*command);
      for (const auto& name : names) {
        if (command->get_option_no_throw(name) != option) continue;
        std::vector<std::string> words{command->get_name()};
        for (int i = 0; i < 2; i++) {
          words.push_back(name);
          if (option->get_items_expected_min() > 0) words.push_back("3");
        }
        EXPECT_ERROR(UsageError, check_arguments(*app, words), " is given twice");
        words.resize(words.size() / 2 + 1);
        EXPECT_NO_THROW(check_arguments(*app, words)) << c10::Join(" ", words);
      }
    }
  }
  EXPECT_ERROR(UsageError, check_arguments(*app, {"train", "--fsdp", "--no-fsdp"}), "--fsdp", "is given twice");
  EXPECT_ERROR(UsageError, check_arguments(*app, {"run", "-n2", "-n", "3"}), "-n", "is given twice");
  EXPECT_NO_THROW(check_arguments(*app, {"opt", "--pass", "a", "--pass=b", "-"}));
  EXPECT_NO_THROW(check_arguments(*app, {"run", "-n", "2", "--ranks-shown", "0", "1", "--pin"}));
  EXPECT_NO_THROW(check_arguments(*app, {"train", "--layers", "-3", "--lr=1"}));
  EXPECT_NO_THROW(check_arguments(*app, {"bench", "--anything", "--anything"}));
}

TEST(Options, AFolderIsNotAFile) {
  TrainConfig config;
  EXPECT_ERROR(UsageError, read_train_config(config, "/tmp"), "cannot read the config file '/tmp': Is a directory");
  config.parallel = {.mesh = "tp=2", .tp_plan = "/tmp"};
  EXPECT_ERROR(UsageError, train::check(config, 2), "cannot read the plan file '/tmp': Is a directory");
  EXPECT_ERROR(UsageError, all_commands()->parse("opt /tmp"), "'/tmp': Is a directory");
}

TEST(Options, AFailedTraceLeavesNoPage) {
  const auto page = c10::str("/tmp/tessera-page-", getpid(), ".html");
  EXPECT_ERROR(UsageError, all_commands()->parse("trace --model nothing -o " + page), "nothing");
  EXPECT_FALSE(std::filesystem::exists(page));
}

}  // namespace
}  // namespace tessera::cli
