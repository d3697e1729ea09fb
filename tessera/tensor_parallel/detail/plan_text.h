#pragma once
#include "tessera/tensor_parallel/plan.h"

#include <iosfwd>
#include <string>
#include <string_view>

// A plan as text, one entry a line:
//
//   # Llama, with sequence parallelism
//   tok_embeddings       = rowwise(input=R, output=S(1))
//   layers.*             = prepare_input(from=[S(1), _], to=[R, _], local=true)
//   layers.*.attn.w[qkv] = colwise(block=64)      # cut between heads only
//   norm                 = sequence
//   ""                   = prepare_output(from=S(-1), to=R)
//
// Styles and their parameters, each with what holds where it is not written:
//
//   colwise                input=R   output=S(-1)  local=true   block=1   sections=1   (a number, or a list of sizes)
//   rowwise                input=S(-1)  output=R   local=true   block=1
//   sequence               dim=1     local=false
//   prepare_input          from=     to=           local=false
//   prepare_output         from=     to=           local=true
//   prepare_input_output   input_from=  input_to=  input_local=false  output_from=  output_to=  output_local=true
//
// A layout is written as a placement is: R, S(1), S(-1), P(sum). from and to take one, or a list in which _ is an input
// that is left alone. A pattern that is empty, or has spaces, '=', '#' or '"' in it, is written in double quotes, with
// \" and \\ and \n for those characters.
namespace tessera {

// The inverse of to_string. Throws UsageError with line and column, what was found, and what may stand there.
Plan parse_plan(std::string_view text);
Style parse_style(std::string_view text);  // "colwise(output=R)"

std::string to_string(const Plan& plan);
std::ostream& operator<<(std::ostream& out, const Plan& plan);

}  // namespace tessera
