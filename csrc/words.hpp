// 32-bit signal words in shared memory: stored with release and a wake, awaited in slices.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <ctime>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

#include "segment.hpp"

namespace st2i {

inline constexpr double kSlice = 0.1;  // seconds between two looks at Ctrl-C

inline std::uint32_t checked_word(std::int64_t word) {
  if (word < 0 || word >= kWords) {
    throw std::out_of_range("signal word " + std::to_string(word) + " does not exist; there are 0 to " +
                            std::to_string(kWords - 1));
  }
  return static_cast<std::uint32_t>(word);
}

inline std::uint32_t checked_value(std::int64_t value) {
  if (value < 0 || value > UINT32_MAX) {
    throw std::invalid_argument("signal value " + std::to_string(value) + " is not in 0 to " +
                                std::to_string(UINT32_MAX));
  }
  return static_cast<std::uint32_t>(value);
}

inline void signal(Word &word, std::uint32_t value) {
  word.store(value, std::memory_order_release);
  // Not PRIVATE: the waiters are in other processes.
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Values count upwards and may wrap: at most 2^31 - 1 ahead is "at least".
inline bool reached(std::uint32_t value, std::uint32_t at_least) {
  return static_cast<std::int32_t>(value - at_least) >= 0;
}

// The value once it is `at_least`; none after `timeout` seconds. `look()` is called once a slice and
// may throw.
template <typename Look>
std::optional<std::uint32_t> wait(const Word &word, std::uint32_t at_least, double timeout, Look look) {
  if (!(timeout >= 0)) {
    throw std::invalid_argument("a time-out of " + std::to_string(timeout) +
                                " s was asked for; the least is 0");
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    const std::uint32_t value = word.load(std::memory_order_acquire);
    if (reached(value, at_least)) return value;
    const double left = timeout - std::chrono::duration<double>(Clock::now() - start).count();
    if (left <= 0) return std::nullopt;
    const timespec slice{0, static_cast<long>(std::min(left, kSlice) * 1e9)};
    if (syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0) == 0) continue;
    if (errno == ETIMEDOUT || errno == EINTR) {
      look();
    } else if (errno != EAGAIN) {
      throw_errno("cannot wait for a signal word");
    }
  }
}

// Which words of a segment are in use. Thread-safe.
class WordTable {
 public:
  std::uint32_t allocate() {
    const std::lock_guard lock(mutex_);
    if (free_.empty() && fresh_ == kWords) {
      throw std::runtime_error("all " + std::to_string(kWords) +
                               " signal words of the heap are in use; free one first");
    }
    if (free_.empty()) return fresh_++;
    return free_.extract(free_.begin()).value();
  }

  void free(std::int64_t word) {
    const std::lock_guard lock(mutex_);
    free_.insert(live(word));
  }

  // The word, if it is allocated.
  std::uint32_t checked(std::int64_t word) const {
    const std::lock_guard lock(mutex_);
    return live(word);
  }

  void check() const {
    const std::lock_guard lock(mutex_);
    if (fresh_ > kWords || (!free_.empty() && *free_.rbegin() >= fresh_)) {
      throw std::logic_error("a signal word that was never given out is free");
    }
  }

 private:
  std::uint32_t live(std::int64_t word) const {
    const std::uint32_t index = checked_word(word);
    if (index >= fresh_ || free_.count(index)) {
      throw std::invalid_argument("signal word " + std::to_string(word) + " is not allocated");
    }
    return index;
  }

  mutable std::mutex mutex_;
  std::uint32_t fresh_ = 0;       // words from here on were never given out
  std::set<std::uint32_t> free_;  // words that came back
};

}  // namespace st2i
