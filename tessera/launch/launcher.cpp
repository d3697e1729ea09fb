#include "tessera/launch/launcher.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/comm/detail/store/authentication.h"
#include "tessera/launch/detail/host_rendezvous.h"
#include "tessera/launch/detail/local_ranks.h"

#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
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

std::string new_temporary_folder() {
  std::string path = setting("TMPDIR") + "/tessera-run-XXXXXX";
  TESSERA_CHECK_ERRNO(mkdtemp(path.data()), "cannot create a folder in TMPDIR, ", setting("TMPDIR"));
  return path;
}

// "tessera::UsageError: there is no ..." -> "there is no ..."
std::string without_type(const std::string& message) {
  const auto end = message.find(": ");
  const auto type = message.substr(0, end);
  const bool is_type = end != message.npos && type.find("::") != type.npos && type.find(' ') == type.npos;
  return is_type ? message.substr(end + 2) : message;
}

void check(const RunOptions& o) {
  TESSERA_CHECK(o.nproc_per_node >= 1, UsageError, "-n ", o.nproc_per_node, ": the number of ranks must be at least 1");
  TESSERA_CHECK(o.nnodes >= 1, UsageError, "--nnodes ", o.nnodes, ": the number of hosts must be at least 1");
  TESSERA_CHECK(o.node_rank >= 0 && o.node_rank < o.nnodes, UsageError, "--node-rank ", o.node_rank, " with --nnodes ",
                o.nnodes, ": node ranks are 0 to ", o.nnodes - 1);
  TESSERA_CHECK(o.nnodes == 1 || !o.rdzv_endpoint.empty(), UsageError, "--nnodes ", o.nnodes,
                " needs --rdzv host:port, an address of the host with --node-rank 0");
  TESSERA_CHECK(o.max_restarts >= 0, UsageError, "--max-restarts ", o.max_restarts, " must be at least 0");
  TESSERA_CHECK(o.threads_per_rank >= 0, UsageError, "--threads-per-rank ", o.threads_per_rank, " must be at least 0");
}

RankSettings settings_of(const RunOptions& o, const std::string& folder) {
  RankSettings s;
  s.max_restarts = o.max_restarts;
  s.threads_per_rank = o.threads_per_rank;
  s.pin = o.pin;
  s.cores = cores_here();
  s.error_dir = folder;
  // Several hosts need the same secret, which only the user can give them.
  s.job_secret = setting_is_set("TESSERA_JOB_SECRET") ? setting("TESSERA_JOB_SECRET")
                 : o.nnodes == 1                      ? comm::store::make_job_secret()
                                                      : comm::detail::kPublicSecret;
  for (const char* name : {"OMP_NUM_THREADS", "TESSERA_GLOO_HOST"})
    if (setting_is_set(name)) s.user_set.insert(name);
  return s;
}

// Runs the worker group of this host and restarts it after failures (torchrun: the elastic agent).
// The order of the members matters: signals are blocked, and the cleanup process is forked, before any thread starts.
class Agent {
 public:
  explicit Agent(const RunOptions& options)
      : options_(options),
        command_(find_command(options.command)),
        folder_(new_temporary_folder()),
        run_id_(std::filesystem::path(folder_).filename().string()),
        cleanup_(folder_),
        settings_(settings_of(options, folder_)),
        out_(STDOUT_FILENO, signals_.stop_fd()),
        err_(STDERR_FILENO, signals_.stop_fd()) {
    create_log_dir();
    open_store();
  }

  int run() {
    for (;; settings_.restarts++) {
      const auto assignment = join();
      if (!assignment) return interrupted();
      const auto failure = run_ranks(*assignment);
      if (!failure) return 0;
      print(failure->text);
      if (!failure->restartable || stop_requested_) return failure->exit_code;
      if (settings_.restarts == options_.max_restarts) {
        if (options_.max_restarts > 0) print(c10::str("no restarts left (--max-restarts ", options_.max_restarts, ")"));
        return failure->exit_code;
      }
      print(c10::str("restarting all ranks (restart ", settings_.restarts + 1, " of ", options_.max_restarts, ")"));
    }
  }

 private:
  void print(const std::string& text) { err_.write(options_.program_name + ": " + text + "\n"); }

  void create_log_dir() const {
    if (options_.log_dir.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(options_.log_dir, error);
    if (error) raise_errno(error.value(), c10::str("cannot create the folder --log-dir ", options_.log_dir));
  }

  // On one host the store listens on loopback, on a free port. The launcher serves it, so ranks do not wait for rank 0,
  // and no other job can take the port.
  void open_store() {
    const auto at = options_.rdzv_endpoint.empty() ? Address{"127.0.0.1", 0} : parse_address(options_.rdzv_endpoint);
    store_address_ = at;
    const std::string& secret = settings_.job_secret;
    if (options_.node_rank == 0) {
      store_ = comm::detail::host_store(at.host, at.port, secret, options_.rdzv_timeout, store_address_.port);
      if (secret == comm::detail::kPublicSecret)
        print(
            c10::str("warning: no TESSERA_JOB_SECRET: every process that reaches ", at.host, ":", at.port,
                     " can join this job. Set the same secret on all hosts:  export TESSERA_JOB_SECRET=$(openssl rand "
                     "-hex 32)"));
    } else {
      const Signals::UnblockScope ctrl_c_interrupts(signals_);
      store_ = comm::detail::join_store(at.host, at.port, secret, options_.rdzv_timeout);
    }
    if (options_.nnodes > 1)
      hosts_.emplace(store_, HostRendezvous::Options{options_.node_rank, options_.nnodes, options_.nproc_per_node,
                                                     options_.max_restarts, host_name(), at.host, run_id_,
                                                     store_address_.port, options_.rdzv_timeout});
  }

  std::optional<HostAssignment> join() {
    if (hosts_) return hosts_->join(settings_.restarts, signals_);
    return HostAssignment{
        0, 1, 0, options_.nproc_per_node, options_.nproc_per_node, store_address_.host, store_address_.port, run_id_};
  }

  RankOutput output(const HostAssignment& assignment) {
    const bool colours = !setting_is_set("NO_COLOR");
    return {&out_,
            &err_,
            assignment.world_size > 1,
            colours && isatty(STDOUT_FILENO),
            colours && isatty(STDERR_FILENO),
            options_.ranks_shown,
            options_.log_dir,
            settings_.restarts > 0};
  }

  // Runs the worker group once. Returns nullopt if all ranks on all hosts succeed.
  std::optional<JobFailure> run_ranks(const HostAssignment& assignment) {
    const auto started = start(assignment);
    LocalRanks& ranks = *started;
    failure_.reset();
    succeeded_ = false;
    reported_absent_.clear();
    while (ranks.running() > 0 || !(succeeded_ || failure_ || ranks.first_failure())) {
      for (const int signal : ranks.poll_events(milliseconds(hosts_ ? 100 : 1000))) handle(signal, ranks);
      if (out_.closed() && !ranks.stopping())
        fail({128 + SIGPIPE, false, "the reader of our standard output has closed it"}, ranks, SIGTERM);
      // Report it to the other hosts at once. Otherwise a failure there that follows from it could be reported first.
      if (ranks.first_failure() && !ranks.stopping())
        hosts_ ? fail(failure_report(ranks), ranks, SIGTERM) : ranks.stop(SIGTERM, options_.grace_period);
      if (!ranks.stopping()) report_absent_ranks(ranks);
      if (hosts_) exchange_status(ranks);
      if (!hosts_ && ranks.running() == 0) succeeded_ = true;
    }
    for (const auto& log : ranks.incomplete_logs()) print("could not write all of the log file " + log);
    if (!failure_ && ranks.first_failure()) failure_ = failure_report(ranks);
    return failure_;
  }

  std::vector<RankPlan> plans_of(const HostAssignment& assignment) const {
    auto plans = plan_ranks(assignment, settings_);
    plans.front().direct_output = options_.direct_output;
    return plans;
  }

  std::unique_ptr<LocalRanks> start(const HostAssignment& assignment) {
    try {
      return std::make_unique<LocalRanks>(command_, plans_of(assignment), output(assignment), signals_, cleanup_);
    } catch (const c10::Error& error) {
      if (hosts_)
        hosts_->report_failure({1, false, c10::str(error.what_without_backtrace(), " (on ", host_name(), ")")});
      throw;
    }
  }

  void fail(const JobFailure& failure, LocalRanks& ranks, int signal) {
    failure_ = hosts_ ? hosts_->report_failure(failure) : failure;
    ranks.stop(signal, options_.grace_period);
  }

  // Ranks that wait for others to join read it.
  void report_absent_ranks(const LocalRanks& ranks) {
    auto absent = ranks.absent();
    if (absent == reported_absent_) return;
    try {
      for (const auto& [rank, why] : reported_absent_)
        if (!absent.contains(rank)) comm::detail::report_absent_rank(*store_, settings_.restarts, rank, "");
      for (const auto& [rank, why] : absent)
        if (!reported_absent_.contains(rank)) comm::detail::report_absent_rank(*store_, settings_.restarts, rank, why);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): heartbeat() reports that the store is gone
    }
    reported_absent_ = std::move(absent);
  }

  // ^Z: the ranks have process groups of their own, so the terminal stops the launcher only.
  void stop_with_ranks(LocalRanks& ranks) {
    ranks.send_signal(SIGSTOP);
    raise(SIGSTOP);  // until SIGCONT, from `fg` or `bg`
    ranks.send_signal(SIGCONT);
  }

  void handle(int signal, LocalRanks& ranks) {
    if (signal == SIGTSTP) return stop_with_ranks(ranks);
    for (const auto& forwarded : Signals::kForwarded) {
      if (forwarded.signal != signal) continue;
      if (!forwarded.ends_job) {
        ranks.send_signal(signal);
      } else if (ranks.stopping()) {  // a second signal, or one after a failure: kill at once
        if (hosts_) hosts_->report_failure(stopped_by(signal));
        ranks.stop(SIGKILL, milliseconds(0));
      } else {
        fail(stopped_by(signal), ranks, signal);
      }
      stop_requested_ = stop_requested_ || forwarded.ends_job;
    }
  }

  void exchange_status(LocalRanks& ranks) {
    const auto now = LocalRanks::Clock::now();
    if (now < next_heartbeat_) return;
    next_heartbeat_ = now + milliseconds(100);
    const bool local_success = ranks.running() == 0 && !failure_ && !ranks.first_failure();
    if (local_success && reported_success_ != settings_.restarts) {
      hosts_->report_success();
      reported_success_ = settings_.restarts;
    }
    const auto status = hosts_->heartbeat();
    succeeded_ = local_success && status.all_succeeded;
    if (status.failure && !failure_ && !succeeded_) fail(*status.failure, ranks, SIGTERM);
  }

  JobFailure stopped_by(int signal) const {
    return {128 + signal, false, c10::str("stopped by signal ", signal, " (", strsignal(signal), ") on ", host_name())};
  }

  // A signal arrived during the rendezvous.
  int interrupted() {
    for (const int signal : signals_.read())
      for (const auto& forwarded : Signals::kForwarded) {
        if (forwarded.signal != signal || !forwarded.ends_job) continue;
        const auto failure = hosts_->report_failure(stopped_by(signal));
        print(failure.text);
        return failure.exit_code;
      }
    return 1;
  }

  JobFailure failure_report(const LocalRanks& ranks) const {
    const RankExit cause = ranks.root_cause();
    const auto error = ranks.error_message(cause.rank), culprit = ranks.culprit();
    std::ostringstream text;
    if (options_.brief_errors && !error.empty()) {
      text << without_type(error) << " (on rank " << cause.rank << ")";
      return {cause.exit_code, true, text.str()};
    }
    if (!culprit.empty()) text << culprit << "; because of it, ";
    text << cause << " on " << host_name();
    if (options_.nproc_per_node > 1) text << "; the other ranks were stopped";
    if (!error.empty()) text << "\n  error: " << error;
    if (const auto lines = ranks.stderr_tail(cause.rank); !lines.empty()) {
      text << "\n  last lines of standard error:";
      for (const auto& line : lines) text << "\n    " << line;
    }
    return {cause.exit_code, true, text.str()};
  }

  const RunOptions& options_;
  const Command command_;
  Signals signals_;
  const std::string folder_, run_id_;
  CleanupProcess cleanup_;
  RankSettings settings_;
  OutputSink out_, err_;
  Address store_address_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::optional<HostRendezvous> hosts_;             // only with several hosts
  std::optional<JobFailure> failure_;               // of the current worker group, on any host
  bool stop_requested_ = false;                     // by a signal
  bool succeeded_ = false;                          // all ranks of the current worker group, on all hosts
  std::map<int64_t, std::string> reported_absent_;  // ranks that the store lists as absent
  int64_t reported_success_ = -1;                   // the last restart number whose success was reported
  LocalRanks::Clock::time_point next_heartbeat_{};
};

}  // namespace

int run(const RunOptions& options) {
  check(options);
  return Agent(options).run();
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
