#pragma once
#include "tessera/checkpoint/detail/manifest.h"
#include "tessera/comm/world.h"
#include "tessera/state/load_state_dict.h"

#include <functional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::dcp {

// Options of load().
struct LoadOptions {
  bool strict = true;       // missing names and wrong sizes are errors; false: reports them and loads the rest
  std::string prefix = "";  // loads only saved names with this prefix; the dict has them without it
  // Compares the checksums of the shards that are read, which reads these shards completely. false: a damaged file can
  // give wrong values. Checkpoints of other programs have no checksums.
  bool verify = true;
  // The name in the dict of a saved name, without `prefix`; "": the tensor is left out. Not set: the same name.
  std::function<std::string(const std::string&)> rename = {};
};

// Loads the checkpoint at `path` into the tensors of a state dict, by name (torch.distributed.checkpoint.load).
// Formats: see detail/checkpoint_source.h. The tensors keep their mesh, placements and dtype, on whichever mesh the
// checkpoint was saved. Each rank reads only the bytes that it needs; no tensor data is communicated. All checks come
// first, on all ranks: if it throws UsageError, it throws on all ranks and nothing has changed. All ranks must call it.
// Ranks on several hosts need a shared file system.
// Example:  auto dict = state_dict(*model);            // aliases of the parameters
//           dcp::load(dict, "out/step-1000");          // fills the parameters
//           auto step = dcp::read_values("out/step-1000").at("step");
LoadReport load(const StateDict& dict, const std::string& path, const LoadOptions& options = {},
                const World& world = World::current());

// The values of a checkpoint (step, seed, ...); {} if it has none: one of another program, unless it is a .distcp one.
Values read_values(const std::string& path);

// A state dict to load optimizer state into before the first step, when the optimizer has no state yet: one tensor per
// saved name with `prefix`, with the saved dtype. A tensor with the sizes of its parameter (state.<parameter>.<entry>)
// gets the parameter's placements; all others are plain. Load into it, then pass it to set_optimizer_state_dict. `path`
// is a checkpoint, as load() takes it.
// Example:  auto state = dcp::optimizer_state_like("out/step-1000", "optimizer.", get_model_state_dict(*model));
StateDict optimizer_state_like(const std::string& path, const std::string& prefix, const StateDict& model);
StateDict optimizer_state_like(const Manifest& manifest, const std::string& prefix, const StateDict& model);

}  // namespace tessera::dcp

namespace tessera {

// A rule of a key map: a saved name that matches `pattern`, a regular expression for the full name, becomes `name`, in
// which $1 is the first group. An empty name leaves the tensor out.
struct KeyRule {
  std::string pattern, name;
};
// Options of load_safetensors().
struct LoadSafetensorsOptions {
  std::vector<KeyRule> key_map = {};  // the first rule that matches; other names stay
  bool strict = true;                 // throws unless every name fits; false: loads what fits and reports the rest
};
// Loads weights into a module, plain or with distributed parameters. `path` is a .safetensors file, or any checkpoint
// that dcp::load reads, such as a folder of Hugging Face. Each rank reads only the bytes that it needs. Parameters keep
// their dtype and placements. All ranks must call it; without init() it loads in this process alone.
//
// Returns which names are missing, unexpected or have other sizes. Throws UsageError if that is anything and `strict`
// is set, for a pattern that is not a regular expression, and if two saved names become one. Nothing has changed then.
// Example:  auto report = ts::load_safetensors(*model, "gpt.safetensors",
//                                              {.key_map = {{"transformer\\.(.*)", "$1"}, {"lm_head\\..*", ""}}});
LoadReport load_safetensors(torch::nn::Module& module, const std::string& path,
                            const LoadSafetensorsOptions& options = {});

}  // namespace tessera
