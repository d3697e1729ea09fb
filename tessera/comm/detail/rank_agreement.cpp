#include "tessera/comm/detail/rank_agreement.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/watch/monitored_backend.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <new>
#include <string_view>

namespace tessera::comm {
namespace {

using Lines = std::vector<std::string>;

std::vector<uint8_t> text_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// One exchange of texts through the store. Each rank counts its own calls. All ranks call in the same order, so the
// counts are equal and give the keys of one exchange.
class StoreExchange {
 public:
  StoreExchange(const Group& group, std::string what, const std::string& kind = "agree")
      : group_(*group), what_(std::move(what)), kind_(kind) {
    TESSERA_CHECK(group_.store(), UsageError, what_, ": group '", group_.name(),
                  "' has no store, which the ranks need to exchange text; create its c10d::ProcessGroup with a store");
    call_ = store().add(c10::str(kind_, "/calls/", group_.rank()), 1);
    prefix_ = c10::str(kind_, "/", call_, "/");
  }
  void put(const std::string& key, const std::string& text) { store().set(prefix_ + key, text_bytes(text)); }
  std::string get(const std::string& key, int64_t from) {
    try {
      return watch::wait_for_key(store(), prefix_ + key, group_.timeout(), [this] { return lost(); });
    } catch (const std::exception&) {
      const std::string lost = this->lost();
      TESSERA_CHECK(lost.empty(), CommError, "rank ", global(group_.rank()), " waits in ", what_, " on group '",
                    group_.name(), "': ", lost);
      TESSERA_FAIL(CommError, "rank ", global(group_.rank()), " waited ",
                   static_cast<double>(group_.timeout().count()) / 1000.0, " s for rank ", global(from), " of group '",
                   group_.name(), "' in ", what_, "; it has not responded");
    }
  }
  void erase(const std::string& key) { store().deleteKey(prefix_ + key); }
  void erase_of_last_call(const std::string& key) {
    if (call_ > 1) store().deleteKey(c10::str(kind_, "/", call_ - 1, "/", key));
  }
  int64_t global(int64_t rank) const { return group_.ranks()[static_cast<size_t>(rank)]; }

 private:
  c10d::Store& store() { return *group_.store(); }
  std::string lost() const {
    const auto* monitored = dynamic_cast<const watch::MonitoredBackend*>(group_.backend().get());
    return monitored ? monitored->lost() : "";
  }
  Communicator& group_;
  std::string what_, kind_, prefix_;
  int64_t call_ = 0;
};

bool has_no_peers(const Communicator& group) {
  return group.size() == 1 || group.backend_name() == std::string_view("fake");
}

std::string join(const Lines& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

Lines split(const std::string& text) {
  Lines lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// The first line that differs, from both ranks.
std::string difference_of_lines(const Lines& first, const Lines& other, int64_t first_rank) {
  const size_t same =
      std::mismatch(first.begin(), first.begin() + static_cast<ptrdiff_t>(std::min(first.size(), other.size())),
                    other.begin())
          .first -
      first.begin();
  const auto line = [&](const Lines& lines) {
    return same < lines.size() ? "'" + lines[same] + "'" : c10::str("only ", lines.size(), " line(s)");
  };
  return c10::str(line(other), " where the first rank has ", line(first), " (line ", same + 1, " of ",
                  std::max(first.size(), other.size()), "; the first rank is rank ", first_rank, ")");
}

// "+" and the text, or the kind and the message of the error that text() has thrown: "!" SystemError, "#"
// InternalError, "-" all others.
std::string text_or_error(const std::function<std::string()>& text) {
  try {
    return "+" + text();
  } catch (const SystemError& error) {
    return c10::str("!", error.what_without_backtrace());
  } catch (const InternalError& error) {
    return c10::str("#", error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return c10::str("-", error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return c10::str("!", error.what());
  } catch (const std::exception& error) {
    return c10::str("-", error.what());
  }
}
bool is_error(const std::string& result) { return result.empty() || result.front() != '+'; }

// The kind of an error that has several causes: the machine, then the library, then the call.
char kind_of_errors(const Lines& results) {
  const auto any = [&](char kind) {
    return std::any_of(results.begin(), results.end(), [&](const auto& r) { return !r.empty() && r.front() == kind; });
  };
  return any('!') ? '!' : any('#') ? '#' : '-';
}

// The errors of all ranks as one message. Equal errors are listed once, with their ranks. "": no rank failed.
std::string errors_in(const Lines& results, const Group& group) {
  std::vector<std::pair<std::string, std::string>> ranks_by_error;
  for (size_t r = 0; r < results.size(); r++) {
    if (!is_error(results[r])) continue;
    const auto text = results[r].empty() ? "no result" : results[r].substr(1);
    auto known =
        std::find_if(ranks_by_error.begin(), ranks_by_error.end(), [&](const auto& e) { return e.first == text; });
    const auto rank = std::to_string(group->ranks()[r]);
    if (known == ranks_by_error.end())
      ranks_by_error.emplace_back(text, rank);
    else
      known->second += ", " + rank;
  }
  const bool all_same = ranks_by_error.size() == 1 && std::all_of(results.begin(), results.end(), is_error);
  std::string all;
  for (const auto& [text, ranks] : ranks_by_error)
    all += (all.empty() ? "" : "\n") +
           (all_same ? "" : c10::str(ranks.find(',') == ranks.npos ? "rank " : "ranks ", ranks, ": ")) + text;
  return all;
}

std::string decide_or_error(const Lines& all, const Group& group,
                            const std::function<std::string(const Lines&)>& decide) {
  const auto errors = errors_in(all, group);
  if (!errors.empty()) return kind_of_errors(all) + errors;
  Lines texts;
  for (const auto& text : all) texts.push_back(text.substr(1));
  return text_or_error([&] { return decide(texts); });
}

}  // namespace

void require_same_on_all_ranks(const Group& group, const std::string& what, const Lines& lines) {
  if (has_no_peers(*group)) return;
  StoreExchange exchange(group, what);
  const auto own = join(lines);
  std::string verdict;
  if (group->rank() == 0) {
    for (int64_t r = 1; r < group->size(); r++) {
      const auto theirs = exchange.get(std::to_string(r), r);
      if (verdict.empty() && theirs != own)
        verdict = c10::str(what, ": the ranks of group '", group->name(), "' differ. Rank ", exchange.global(r),
                           " has ", difference_of_lines(lines, split(theirs), exchange.global(0)));
      exchange.erase(std::to_string(r));
    }
    exchange.put("verdict", verdict);
  } else {
    exchange.put(std::to_string(group->rank()), own);
    verdict = exchange.get("verdict", 0);
  }
  TESSERA_CHECK(verdict.empty(), UsageError, verdict);
}

std::string broadcast_text(const Group& group, const std::string& what, const std::string& text) {
  if (has_no_peers(*group)) return text;
  StoreExchange exchange(group, what);
  if (group->rank() == 0) {
    exchange.put("text", text);
    return text;
  }
  return exchange.get("text", 0);
}

std::string gather_decide_broadcast(const Group& group, const std::string& what,
                                    const std::function<std::string()>& text,
                                    const std::function<std::string(const Lines&)>& decide) {
  const auto own = text_or_error(text);
  std::string verdict;
  if (has_no_peers(*group)) {
    verdict = decide_or_error({own}, group, decide);
  } else {
    StoreExchange exchange(group, what, "decide");
    if (group->rank() == 0) {
      Lines all{own};
      for (int64_t r = 1; r < group->size(); r++) {
        all.push_back(exchange.get(std::to_string(r), r));
        exchange.erase(std::to_string(r));
      }
      exchange.erase_of_last_call("verdict");  // all ranks have made this call, so all have read it
      verdict = decide_or_error(all, group, decide);
      exchange.put("verdict", verdict);
    } else {
      exchange.put(std::to_string(group->rank()), own);
      verdict = exchange.get("verdict", 0);
    }
  }
  if (!is_error(verdict)) return verdict.substr(1);
  const auto message = c10::str(what, ": ", verdict.substr(1));
  TESSERA_CHECK(verdict.front() != '!', SystemError, message);
  if (verdict.front() == '#')
    throw InternalError({__func__, __FILE__, __LINE__}, message);  // it has the request to report
  TESSERA_FAIL(UsageError, message);
}

}  // namespace tessera::comm
