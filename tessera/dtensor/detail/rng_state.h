#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

// The state of a generator of LibTorch, read and set by registered ops. A tracer records them: a compiled step that
// saves a state and draws from it again (activation checkpointing) does the same in every run.
// No generator: the default one of the CPU.
namespace tessera::detail {

// tessera::rng_state: a copy of the state, a CPU byte tensor.
at::Tensor rng_state(const std::optional<at::Generator>& generator = {});
// tessera::set_rng_state: sets the state that rng_state returned.
void set_rng_state(const at::Tensor& state, const std::optional<at::Generator>& generator = {});

// Seeds a generator by a draw of Tessera's random stream. In a traced step, each run does so with its own draw.
void seed_generator(const at::Generator& generator, uint64_t seed, uint64_t offset);

}  // namespace tessera::detail
