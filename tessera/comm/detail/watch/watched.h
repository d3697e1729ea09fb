#pragma once
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm::watch {

class Journal;

// A backend that the watch looks after: it can be made to free its members with a reason (c10d's own abort() takes
// none), and carries what belongs to its group.
struct Watched {
  virtual ~Watched() = default;
  virtual void poison(const std::string& reason) = 0;  // from any thread; the first reason stays

  std::shared_ptr<Journal> journal;        // where collectives are written down; null: nowhere
  std::function<std::string()> tell_lost;  // null: nobody watches
  std::string lost() const { return tell_lost ? tell_lost() : ""; }  // which member and why; "": none that is known
};

}  // namespace tessera::comm::watch
