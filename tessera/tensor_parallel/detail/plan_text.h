#pragma once
#include "tessera/tensor_parallel/plan.h"

#include <iosfwd>
#include <string>
#include <string_view>

// The text form of plans, with one entry per line:
//
//   # Llama, with sequence parallelism
//   tok_embeddings       = rowwise(input=R, output=S(1))
//   layers.*             = prepare_input(from=[S(1), _], to=[R, _], local=true)
//   layers.*.attn.w[qkv] = colwise(block=64)      # keep heads together
//   norm                 = sequence
//   ""                   = prepare_output(from=S(-1), to=R)
//
// Styles and their parameters, with the defaults:
//
//   colwise                input=R   output=S(-1)  local=true   block=1   sections=1   (a number, or a list of sizes)
//   rowwise                input=S(-1)  output=R   local=true   block=1
//   sequence               dim=1     local=false
//   prepare_input          from=     to=           local=false
//   prepare_output         from=     to=           local=true
//   prepare_input_output   input_from=  input_to=  input_local=false  output_from=  output_to=  output_local=true
//
// Layouts are placements: R, S(1), S(-1), P(sum). `from` and `to` take one placement, or a list; _ in a list leaves an
// input unchanged. A pattern that is empty or contains spaces, '=', '#' or '"' is written in double quotes, with \" and
// \\ and \n for those characters.
namespace tessera {

// The inverse of to_string. The UsageError of a syntax error has the line and column, the text found, and the text
// expected.
Plan parse_plan(std::string_view text);
Style parse_style(std::string_view text);  // "colwise(output=R)"

// Printing, in the form that parse_plan reads.
std::string to_string(const Plan& plan);
std::ostream& operator<<(std::ostream& out, const Plan& plan);

}  // namespace tessera
