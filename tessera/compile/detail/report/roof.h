#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>
#include <string>

// How fast this machine can be, and how much a node of a program has to do: the roofline model.
namespace tessera::compiler {

// Best rates on the CPU with at::get_num_threads() threads.
struct Roof {
  double gflops = 0;                // of a product of 1024 x 1024 matrices in float
  double gigabytes_per_second = 0;  // read and written, of a copy that no cache holds
};
// Measured once per process, in some 0.1 s.
const Roof& measured_roof();

// What a node has to do at least; nothing for a collective, whose time depends on other ranks.
struct NodeWork {
  double flops = 0;  // of matrix products and attention; of other ops 0
  double bytes = 0;  // of its operands and results, each once
  NodeWork& operator+=(const NodeWork& other) {
    flops += other.flops, bytes += other.bytes;
    return *this;
  }
};
NodeWork work_of_node(const Program& program, const Node& node);
// Milliseconds that the work takes at the roof.
double milliseconds_at(const Roof& roof, const NodeWork& work);

// The op, the generated kernel or the kernel of Tessera that a node calls: "aten.mm", "kernel cpp_fused_add_0",
// "tessera.cpu_kernel matmul".
std::string name_in_report(const Node& node);

}  // namespace tessera::compiler
