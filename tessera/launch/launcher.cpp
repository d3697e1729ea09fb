#include "tessera/launch/launcher.h"

#include "tessera/base/error.h"
#include "tessera/base/settings.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/launch/crew.h"
#include "tessera/launch/hosts.h"

#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <sstream>

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;

std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

std::vector<int> cores_here() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; core++)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

std::string new_folder() {
  std::string path = setting("TMPDIR") + "/tessera-run-XXXXXX";
  TESSERA_CHECK(mkdtemp(path.data()), UsageError, "cannot make a folder in TMPDIR, ", setting("TMPDIR"), ": ",
                std::strerror(errno));
  return path;
}

void check(const RunOptions& o) {
  TESSERA_CHECK(o.ranks >= 1, UsageError, "-n ", o.ranks, ": there is at least one rank");
  TESSERA_CHECK(o.nodes >= 1, UsageError, "--nnodes ", o.nodes, ": there is at least one host");
  TESSERA_CHECK(o.node >= 0 && o.node < o.nodes, UsageError, "--node-rank ", o.node, " with --nnodes ", o.nodes,
                ": hosts are numbered 0 to ", o.nodes - 1);
  TESSERA_CHECK(o.nodes == 1 || !o.rendezvous.empty(), UsageError, "--nnodes ", o.nodes,
                " needs --rdzv host:port, where the first host (--node-rank 0) can be reached");
  TESSERA_CHECK(o.max_restarts >= 0, UsageError, "--max-restarts ", o.max_restarts, " is less than none");
  TESSERA_CHECK(o.threads >= 0, UsageError, "--threads-per-rank ", o.threads, " is less than none");
}

RankSettings settings_of(const RunOptions& o, const std::string& folder) {
  RankSettings s;
  s.run_id = std::filesystem::path(folder).filename().string();
  s.max_restarts = o.max_restarts;
  s.threads = o.threads;
  s.pin = o.pin;
  s.cores = cores_here();
  s.error_folder = folder;
  for (const char* name : {"OMP_NUM_THREADS", "TESSERA_GLOO_HOST"})
    if (setting_is_set(name)) s.given.insert(name);
  return s;
}

// One job, seen from this host. The order of members is the order of birth: signals are held back before there are
// threads that could receive them, and the guard is forked before there are threads at all.
class Job {
 public:
  explicit Job(const RunOptions& options)
      : options_(options),
        program_(find_program(options.command)),
        folder_(new_folder()),
        guard_(folder_),
        settings_(settings_of(options, folder_)),
        out_(STDOUT_FILENO, signals_.fd()),
        err_(STDERR_FILENO, signals_.fd()) {
    if (!options.log_folder.empty()) std::filesystem::create_directories(options.log_folder);
    open_store();
  }

  int run() {
    for (;; settings_.restarts++) {
      const auto share = this_share();
      if (!share) return interrupted(signals_.read());
      const auto failure = run_ranks(*share);
      if (!failure) return 0;
      const bool again = failure->restartable && settings_.restarts < options_.max_restarts;
      say(failure->text);
      if (!again) {
        if (failure->restartable && options_.max_restarts > 0)
          say(c10::str("all ", options_.max_restarts, " restarts are used up"));
        return failure->exit_code;
      }
      say(c10::str("starting all ranks again (", settings_.restarts + 1, " of ", options_.max_restarts, ")"));
    }
  }

 private:
  void say(const std::string& text) { err_.write("tessera run: " + text + "\n"); }

  // On one host: on loopback, at a port the system finds. Ranks find the store there already, so none has to wait for
  // rank 0, and no other job can have taken the port meanwhile.
  void open_store() {
    const auto at = options_.rendezvous.empty() ? Address{"127.0.0.1", 0} : parse_address(options_.rendezvous);
    place_ = at;
    if (options_.node == 0) {
      store_ = comm::detail::keep_store(at.host, at.port, options_.timeout, place_.port);
    } else {
      const Signals::Delivered ctrl_c_ends_the_wait(signals_);
      store_ = comm::detail::tcp_store(at.host, at.port, false, options_.timeout);
    }
    if (options_.nodes > 1)
      hosts_.emplace(store_, Hosts::Options{options_.node, options_.nodes, options_.ranks, options_.max_restarts,
                                            host_name(), at.host, place_.port, options_.timeout});
  }

  std::optional<HostShare> this_share() {
    if (hosts_) return hosts_->join(settings_.restarts, signals_);
    return HostShare{0, 1, 0, options_.ranks, options_.ranks, place_.host, place_.port};
  }

  CrewOutput output(const HostShare& share) {
    const bool colours = !setting_is_set("NO_COLOR");
    return {&out_,
            &err_,
            share.world_size > 1,
            colours && isatty(STDOUT_FILENO),
            colours && isatty(STDERR_FILENO),
            options_.ranks_shown,
            options_.log_folder,
            settings_.restarts > 0};
  }

  // From start to end of all ranks. Nothing: all ended well, on every host.
  std::optional<JobFailure> run_ranks(const HostShare& share) {
    Crew crew(program_, plan_ranks(share, settings_), output(share), signals_, guard_);
    std::optional<JobFailure> failure;  // from elsewhere than our ranks
    bool finished = false;              // all is done, everywhere
    while (crew.running() > 0 || !(finished || failure || crew.first_failure())) {
      const auto came = crew.turn(milliseconds(hosts_ ? 100 : 60'000));
      for (const int signal : came) take(signal, crew, failure);
      if (out_.closed() && !crew.stopping()) {
        failure = JobFailure{128 + SIGPIPE, false, "nobody reads our output any more"};
        crew.stop(SIGTERM, options_.grace);
      }
      if (crew.first_failure() && !crew.stopping()) crew.stop(SIGTERM, options_.grace);
      if (!finished) finished = ask_hosts(crew, failure);
    }
    if (!failure && crew.first_failure()) failure = describe(crew);
    return failure && hosts_ ? hosts_->report(*failure) : failure;
  }

  void take(int signal, Crew& crew, std::optional<JobFailure>& failure) {
    for (const auto& row : Signals::kPassedOn) {
      if (row.signal != signal) continue;
      if (!row.stops) {
        crew.pass_on(signal);
      } else if (failure && !failure->restartable) {  // asked for the second time
        crew.stop(SIGKILL, milliseconds(0));
      } else {
        failure = stopped_by(signal);
        crew.stop(signal, options_.grace);
      }
    }
  }

  // True: all ranks of all hosts have ended well.
  bool ask_hosts(Crew& crew, std::optional<JobFailure>& failure) {
    const bool ours = crew.running() == 0 && !failure && !crew.first_failure();
    if (!hosts_) return ours;
    if (ours && told_ != settings_.restarts) {
      hosts_->finish();
      told_ = settings_.restarts;
    }
    if (crew.first_failure() && !failure && crew.running() == 0) return false;
    const auto news = hosts_->news();
    if (news.failure && !failure) {
      failure = news.failure;
      crew.stop(SIGTERM, options_.grace);
    }
    return news.all_finished && ours;
  }

  JobFailure stopped_by(int signal) const {
    return {128 + signal, false, c10::str("stopped by signal ", signal, " (", strsignal(signal), ") on ", host_name())};
  }

  int interrupted(const std::vector<int>& signals) {
    for (const int signal : signals)
      for (const auto& row : Signals::kPassedOn)
        if (row.signal == signal && row.stops) {
          say(stopped_by(signal).text);
          return 128 + signal;
        }
    return 1;
  }

  JobFailure describe(const Crew& crew) const {
    const Ended cause = crew.cause();
    std::ostringstream text;
    text << cause << " on " << host_name();
    if (options_.ranks > 1) text << "; the other ranks were stopped";
    if (const auto words = crew.last_words(cause.rank); !words.empty()) text << "\n  its error: " << words;
    if (const auto lines = crew.last_lines(cause.rank); !lines.empty()) {
      text << "\n  the last lines of its standard error:";
      for (const auto& line : lines) text << "\n    " << line;
    }
    return {cause.exit_code, true, text.str()};
  }

  const RunOptions& options_;
  const Program program_;
  Signals signals_;
  const std::string folder_;
  Guard guard_;
  RankSettings settings_;
  Sink out_, err_;
  Address place_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::optional<Hosts> hosts_;
  int64_t told_ = -1;  // the start whose good end the other hosts know of
};

}  // namespace

int run(const RunOptions& options) {
  check(options);
  return Job(options).run();
}

Address parse_address(const std::string& text) {
  const size_t colon = text.rfind(':');
  Address address;
  const char* const end = text.data() + text.size();
  const bool good = colon != std::string::npos && colon > 0 &&
                    std::from_chars(text.data() + colon + 1, end, address.port).ptr == end && address.port > 0 &&
                    address.port < 65536;
  TESSERA_CHECK(good, UsageError, "--rdzv '", text, "': write host:port, as in  --rdzv head:29400");
  address.host = text.substr(0, colon);
  if (address.host.starts_with('[') && address.host.ends_with(']'))
    address.host = address.host.substr(1, address.host.size() - 2);
  return address;
}

}  // namespace tessera::launch
