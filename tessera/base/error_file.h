#pragma once
#include <cstdint>
#include <exception>
#include <string>

// The error file of a rank. torchrun and `tessera run` give each rank a file name in TORCHELASTIC_ERROR_FILE. After the
// rank has ended, they show the error in that file as the cause of the failure, before exit codes and later errors of
// other ranks.
namespace tessera {

// Writes an error to the error file, if a launcher asks for one. The first error is kept. The other ranks are notified
// too, so they do not wait for this one.
// It is for programs that catch all exceptions in main(). Other programs do not need it: see record_uncaught_errors().
// Example:  catch (const std::exception& error) { tessera::record_error(error); return 1; }
void record_error(const std::exception& error);

// From now on, an uncaught exception on any thread is recorded before the process ends. Without a launcher, it is
// printed on one line; TORCH_SHOW_CPP_STACKTRACES=1 adds the backtrace. It installs a terminate handler and calls the
// previous one, if that is not the default. init() calls it.
void record_uncaught_errors();

// Sets the callback that gets the message of each recorded error, before the process ends and after the error file is
// written. There is one callback; the world sets it to notify other ranks.
void set_error_callback(void (*callback)(const std::string& message));

namespace detail {
// Notes that `rank` has caused the error whose message contains `why`. If that error is recorded later, the launcher
// reports `rank`, and not the rank that failed because of it. The last 16 notes are kept.
void note_culprit(int64_t rank, const std::string& why);
// The rank that has caused the error with this message; -1: none was noted.
int64_t culprit_of(const std::string& message);

// {"message":{"message":text,"extraInfo":{"timestamp":seconds}}}, the format of PyTorch's error_handler.py.
// A culprit is added as "culprit":"2".
std::string error_file_text(const std::string& message, int64_t seconds, int64_t culprit = -1);
// The culprit in an error file; -1: none.
int64_t culprit_in(const std::string& error_file_text);
// The innermost "message" of an error file of this library or of PyTorch; empty if it has none.
std::string message_in(const std::string& error_file_text);
}  // namespace detail
}  // namespace tessera
