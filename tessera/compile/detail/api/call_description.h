#pragma once
#include "tessera/compile/detail/trace/call_arguments.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// What a saved program is specialized for, as text that is equal in another process: one line per module, parameter,
// optimizer, group of options, tensor, and other leaf of the arguments. A Signature compares addresses and contents of
// objects instead, which another process does not have. The members of your own module classes are not described: the
// checks of a compiled step find out whether its code and its members give the same program.
// UsageError if the arguments have something that no text can describe: a distributed tensor, a hook, a generator.
std::vector<std::string> describe_call(const CallArguments& arguments, const std::vector<bool>& number_is_key);

// "" if equal; otherwise the first line that differs: "argument tensor 0 is f32[3], the saved program has f32[4]".
std::string difference_of_calls(const std::vector<std::string>& now, const std::vector<std::string>& saved);

}  // namespace tessera::compiler
