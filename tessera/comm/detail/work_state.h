#pragma once
#include "tessera/base/error.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/records.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

namespace watch {
class LastCollectiveRecorder;
}

struct Work::State {
  Group group;
  uint64_t sequence = 0;
  CommKind kind = CommKind::Barrier;
  Family family = Family::C10d;
  const char* tensor_name = "";
  c10::intrusive_ptr<c10d::Work> transfer;
  std::function<void()> finish;    // runs once, in the first wait(), after the transfer: removes padding, permutes back
  std::unique_ptr<Record> record;  // null if the post was not observed
  watch::LastCollectiveRecorder* recorder = nullptr;  // null: the group is not monitored
  bool finished = false;
};

// "all_reduce #4 ('wq.grad') on group 'dp' (rank 1 of 0,2)"
std::string describe(const Communicator& group, CommKind kind, Family family, uint64_t sequence,
                     const char* tensor_name);

// Runs `call`. Exceptions become a CommError that starts with describe(). A UsageError is not changed. A CommError is
// not changed if it contains the group's name; an alias of a group (a mesh axis) adds its own name.
template <class Call>
auto named_errors(const Communicator& group, CommKind kind, Family family, uint64_t sequence, const char* tensor_name,
                  Call&& call) {
  try {
    return call();
  } catch (const CommError& error) {
    if (std::string(error.what_without_backtrace()).find(c10::str("'", group.name(), "'")) != std::string::npos) throw;
    TESSERA_FAIL(CommError, describe(group, kind, family, sequence, tensor_name), ": ", error.what_without_backtrace());
  } catch (const UsageError&) {
    throw;
  } catch (const c10::Error& error) {
    TESSERA_FAIL(CommError, describe(group, kind, family, sequence, tensor_name), ": ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    TESSERA_FAIL(CommError, describe(group, kind, family, sequence, tensor_name), ": ", error.what());
  }
}

}  // namespace tessera::comm
