#pragma once
#include <c10/util/StringUtil.h>

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

// Fuzz targets: one per format of text or file that the library reads. Each target has a file <name>_fuzz.cpp and a
// folder corpus/<name>.
//
// A parser has two answers for any input: a value, or a UsageError. A target returns for both. It lets every other
// exception pass, and throws PropertyError if a value violates a property of the format, such as parse(print(x)) == x.
// Both are findings: libFuzzer stops with the input (fuzz_main.cpp), corpus_test.cpp reports the file.
namespace tessera::fuzz {

struct FuzzTarget {
  const char* name;
  void (*run)(std::string_view input);
};
std::span<const FuzzTarget> fuzz_targets();

// Errors then have no backtrace, which takes most of the time of a refused input.
void leave_out_backtraces();

void fuzz_distcp(std::string_view input);
void fuzz_ir(std::string_view input);
void fuzz_json(std::string_view input);
void fuzz_manifest(std::string_view input);
void fuzz_mesh(std::string_view input);
void fuzz_placement(std::string_view input);
void fuzz_plan(std::string_view input);
void fuzz_safetensors(std::string_view input);
void fuzz_schedule(std::string_view input);
void fuzz_store_wire(std::string_view input);
void fuzz_token_file(std::string_view input);
void fuzz_toml(std::string_view input);
void fuzz_torch_archive(std::string_view input);

struct PropertyError : std::logic_error {
  using std::logic_error::logic_error;
};

template <class... Message>
void require(bool holds, const Message&... message) {
  if (!holds) throw PropertyError(c10::str(message...));
}

}  // namespace tessera::fuzz
