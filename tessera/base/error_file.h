#pragma once
#include <cstdint>
#include <exception>
#include <string>

// The last words of a rank. torchrun and `tessera run` give each rank a file (TORCHELASTIC_ERROR_FILE); what is in it
// when the rank has ended is shown as the cause, ahead of exit codes and of what other ranks said later.
namespace tessera {

// Writes what went wrong into that file, where a launcher asks for it; the first error stays. The other ranks hear of
// it, too, and need not wait for this one.
// For programs that catch what leaves their main. Those that do not need not call it: see below.
// Example:  catch (const std::exception& error) { tessera::record_error(error); return 1; }
void record_error(const std::exception& error);

// From now on an exception that nobody catches, on any thread, is recorded before the process ends as it would have.
// init() calls it where a launcher asks for the file: a handler needs no change to anyone's main, and sees threads too.
void record_uncaught_errors();

// `listener` is called with what is recorded, before the process ends over it. There is one: the world's.
void tell_errors_to(void (*listener)(const std::string& message));

namespace detail {
// {"message": {"message": text, "extraInfo": {"timestamp": seconds}}}, as PyTorch's error_handler.py writes it.
std::string error_file_text(const std::string& message, int64_t seconds);
// The innermost "message" of such a text, ours or PyTorch's; empty if there is none.
std::string message_in(const std::string& error_file_text);
}  // namespace detail
}  // namespace tessera
