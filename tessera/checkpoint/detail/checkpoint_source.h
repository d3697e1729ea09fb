#pragma once
#include "tessera/checkpoint/detail/manifest.h"

#include <string>

namespace tessera::dcp {

// A place that tensors can be loaded from.
struct Source {
  std::string folder;  // that the files are in
  Manifest manifest;
};

// Reads what is there, headers alone. By what `path` is:
//
//   a folder with tessera.json                    as saved by save()
//   a folder with model.safetensors.index.json    Hugging Face's: the files that it names
//   a folder with *.safetensors                   all of them; DCP's, whose metadata say where each piece belongs
//   a file                                        one .safetensors file
//
// Throws UsageError for what is none of these, for headers that are not right (safetensors.h), and for pieces that do
// not make up their tensor: those that overlap, and holes.
Source open_source(const std::string& path);

// The values that were saved, {} in a foreign checkpoint.
Values read_values(const std::string& path);

}  // namespace tessera::dcp
