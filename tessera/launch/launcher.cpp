#include "tessera/launch/launcher.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/launch/detail/local_ranks.h"
#include "tessera/launch/detail/host_rendezvous.h"

#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <memory>
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

// "tessera::UsageError: there is no ..." -> "there is no ..."
std::string without_type(const std::string& words) {
  const auto end = words.find(": ");
  const auto type = words.substr(0, end);
  const bool is_type = end != words.npos && type.find("::") != type.npos && type.find(' ') == type.npos;
  return is_type ? words.substr(end + 2) : words;
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
        run_id_(std::filesystem::path(folder_).filename().string()),
        guard_(folder_),
        settings_(settings_of(options, folder_)),
        out_(STDOUT_FILENO, signals_.stop_fd()),
        err_(STDERR_FILENO, signals_.stop_fd()) {
    make_log_folder();
    open_store();
  }

  int run() {
    for (;; settings_.restarts++) {
      const auto share = this_share();
      if (!share) return interrupted();
      const auto failure = run_ranks(*share);
      if (!failure) return 0;
      say(failure->text);
      if (!failure->restartable || stop_asked_) return failure->exit_code;
      if (settings_.restarts == options_.max_restarts) {
        if (options_.max_restarts > 0) say(c10::str("all ", options_.max_restarts, " restarts are used up"));
        return failure->exit_code;
      }
      say(c10::str("starting all ranks again (", settings_.restarts + 1, " of ", options_.max_restarts, ")"));
    }
  }

 private:
  void say(const std::string& text) { err_.write(options_.speaker + ": " + text + "\n"); }

  void make_log_folder() const {
    if (options_.log_folder.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(options_.log_folder, error);
    TESSERA_CHECK(!error, UsageError, "cannot make the folder --log-dir ", options_.log_folder, ": ", error.message());
  }

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
                                            host_name(), at.host, run_id_, place_.port, options_.timeout});
  }

  std::optional<HostShare> this_share() {
    if (hosts_) return hosts_->join(settings_.restarts, signals_);
    return HostShare{0, 1, 0, options_.ranks, options_.ranks, place_.host, place_.port, run_id_};
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
    const auto started = start(share);
    Crew& crew = *started;
    failure_.reset();
    finished_ = false;
    while (crew.running() > 0 || !(finished_ || failure_ || crew.first_failure())) {
      for (const int signal : crew.turn(milliseconds(hosts_ ? 100 : 60'000))) take(signal, crew);
      if (out_.closed() && !crew.stopping())
        fail({128 + SIGPIPE, false, "nobody reads our output any more"}, crew, SIGTERM);
      // Other hosts hear of it at once, or what breaks there would seem to be the cause.
      if (crew.first_failure() && !crew.stopping())
        hosts_ ? fail(describe(crew), crew, SIGTERM) : crew.stop(SIGTERM, options_.grace);
      if (hosts_) ask_hosts(crew);
      if (!hosts_ && crew.running() == 0) finished_ = true;
    }
    for (const auto& log : crew.broken_logs()) say("could not write all of " + log);
    if (!failure_ && crew.first_failure()) failure_ = describe(crew);
    return failure_;
  }

  std::vector<RankPlan> plans_of(const HostShare& share) const {
    auto plans = plan_ranks(share, settings_);
    plans.front().direct_output = options_.direct;
    return plans;
  }

  std::unique_ptr<Crew> start(const HostShare& share) {
    try {
      return std::make_unique<Crew>(program_, plans_of(share), output(share), signals_, guard_);
    } catch (const c10::Error& error) {
      if (hosts_) hosts_->report({1, false, c10::str(error.what_without_backtrace(), " (on ", host_name(), ")")});
      throw;
    }
  }

  void fail(const JobFailure& failure, Crew& crew, int signal) {
    failure_ = hosts_ ? hosts_->report(failure) : failure;
    crew.stop(signal, options_.grace);
  }

  void take(int signal, Crew& crew) {
    for (const auto& row : Signals::kPassedOn) {
      if (row.signal != signal) continue;
      if (!row.stops) {
        crew.pass_on(signal);
      } else if (crew.stopping()) {  // asked again, or while a failure is being dealt with: no more patience
        if (hosts_) hosts_->report(stopped_by(signal));
        crew.stop(SIGKILL, milliseconds(0));
      } else {
        fail(stopped_by(signal), crew, signal);
      }
      stop_asked_ = stop_asked_ || row.stops;
    }
  }

  void ask_hosts(Crew& crew) {
    const auto now = Crew::Clock::now();
    if (now < next_news_) return;
    next_news_ = now + milliseconds(100);
    const bool ours = crew.running() == 0 && !failure_ && !crew.first_failure();
    if (ours && told_ != settings_.restarts) {
      hosts_->finish();
      told_ = settings_.restarts;
    }
    const auto news = hosts_->news();
    finished_ = ours && news.all_finished;
    if (news.failure && !failure_ && !finished_) fail(*news.failure, crew, SIGTERM);
  }

  JobFailure stopped_by(int signal) const {
    return {128 + signal, false, c10::str("stopped by signal ", signal, " (", strsignal(signal), ") on ", host_name())};
  }

  int interrupted() {  // while other hosts were waited for
    for (const int signal : signals_.read())
      for (const auto& row : Signals::kPassedOn) {
        if (row.signal != signal || !row.stops) continue;
        const auto failure = hosts_->report(stopped_by(signal));
        say(failure.text);
        return failure.exit_code;
      }
    return 1;
  }

  JobFailure describe(const Crew& crew) const {
    const Ended cause = crew.cause();
    std::ostringstream text;
    if (const auto words = crew.last_words(cause.rank); options_.brief && !words.empty()) {
      text << without_type(words) << " (on rank " << cause.rank << ")";
      return {cause.exit_code, true, text.str()};
    }
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
  const std::string folder_, run_id_;
  Guard guard_;
  RankSettings settings_;
  Sink out_, err_;
  Address place_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::optional<Hosts> hosts_;
  std::optional<JobFailure> failure_;  // of this start of the ranks, here or on another host
  bool stop_asked_ = false;            // by a signal to us
  bool finished_ = false;              // all ranks of this start have ended well, on every host
  int64_t told_ = -1;                  // the start whose good end the other hosts know of
  Crew::Clock::time_point next_news_{};
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
