#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>

// What `tessera ckpt` does. Paths are checkpoints of any format that dcp::load reads.
namespace tessera::cli {

// Prints the values and one line per tensor: name, dtype, sizes, shards, bytes.
void show_checkpoint(const std::string& path, bool json, std::ostream& out);

// Reads every byte: checks sizes, shards and checksums. Prints one line per problem, then a summary. Returns whether
// all is well.
bool verify_checkpoint(const std::string& path, std::ostream& out);

// Compares values and tensors by name. Prints one line per difference. Returns whether the checkpoints are equal.
// Elements that differ by at most `tolerance` count as equal.
bool diff_checkpoints(const std::string& a, const std::string& b, double tolerance, std::ostream& out);

struct ConvertOptions {
  std::string to = "safetensors";        // "safetensors", "distcp" or "tessera"
  std::string prefix = "";               // only names with this prefix, which is removed
  std::string from_hf = "", to_hf = "";  // a family of dcp::HuggingFaceModel; "auto" for from_hf: as config.json says
  int64_t heads = 0, kv_heads = 0;       // of Llama and Mixtral
  int64_t max_file_bytes = int64_t{5} << 30;  // of a safetensors file
};
// Writes `from` as a new folder `to`.
void convert_checkpoint(const std::string& from, const std::string& to, const ConvertOptions& options,
                        std::ostream& out);

}  // namespace tessera::cli
