#pragma once
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

// The time of a call in microseconds: best and median of several repetitions of many calls.
namespace tessera::bench {

enum class TimerClock : uint8_t {
  Wall,
  ThreadCpu,  // CPU time of this thread; for more ranks than cores, where wall time includes waiting for a core
};

struct TimerOptions {
  TimerClock clock = TimerClock::Wall;
  int repetitions = 9;
  double seconds = 0.02;   // approximate time of a repetition
  int64_t iterations = 0;  // calls per repetition, instead of `seconds`; ranks that call collectives need equal values
};

struct Timing {
  double best_us = 0, median_us = 0;
  int64_t iterations = 0;
};

inline double now_us(TimerClock clock) {
  timespec t{};
  clock_gettime(clock == TimerClock::Wall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

namespace detail {

template <class Function>
double run_us(Function& function, int64_t iterations, TimerClock clock) {
  double start = now_us(clock);
  for (int64_t i = 0; i < iterations; i++) function();
  return now_us(clock) - start;
}

// Doubles the number of calls until a repetition is long enough. This also warms up caches.
template <class Function>
int64_t calibrate(Function& function, const TimerOptions& options) {
  if (options.iterations > 0) {
    run_us(function, std::max<int64_t>(1, options.iterations / 10), options.clock);
    return options.iterations;
  }
  for (int64_t n = 1;; n *= 2) {
    double us = run_us(function, n, TimerClock::Wall);
    if (us >= options.seconds * 0.5e6) return n;
  }
}

}  // namespace detail

// Times several functions alternately (a b a b ...), so that a machine that slows down affects all of them.
// Example:  auto [ours, plain] = time_alternating({}, [&] { a + b; }, [&] { x + y; });
template <class... Functions>
std::array<Timing, sizeof...(Functions)> time_alternating(const TimerOptions& options, Functions&&... functions) {
  constexpr size_t n = sizeof...(Functions);
  std::array<Timing, n> timings{};
  std::array<std::vector<double>, n> samples;
  size_t k = 0;
  ((timings[k++].iterations = detail::calibrate(functions, options)), ...);
  for (int repetition = 0; repetition < options.repetitions; repetition++) {
    k = 0;
    ((samples[k].push_back(detail::run_us(functions, timings[k].iterations, options.clock) /
                           static_cast<double>(timings[k].iterations)),
      k++),
     ...);
  }
  for (size_t i = 0; i < n; i++) {
    std::sort(samples[i].begin(), samples[i].end());
    timings[i].best_us = samples[i].front();
    timings[i].median_us = samples[i][samples[i].size() / 2];
  }
  return timings;
}

template <class Function>
Timing time_us(const TimerOptions& options, Function&& function) {
  return time_alternating(options, function)[0];
}

}  // namespace tessera::bench
