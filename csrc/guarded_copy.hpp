// Copying from a mapped file that others may cut short meanwhile: an error instead of SIGBUS.
#pragma once

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>

#include "copy.hpp"

namespace st2i {

namespace guard {

struct Range {
  sigjmp_buf back;
  const char *from;
  std::uint64_t nbytes;
};

// What this thread is copying. Initial-exec: a signal handler must not allocate it.
[[gnu::tls_model("initial-exec")]] inline thread_local Range *volatile copying = nullptr;
inline struct sigaction before {};

inline void on_bus_error(int number, siginfo_t *info, void *context) {
  Range *range = copying;
  if (range != nullptr) {
    const auto start = reinterpret_cast<std::uintptr_t>(range->from);
    if (reinterpret_cast<std::uintptr_t>(info->si_addr) - start < range->nbytes) {
      siglongjmp(range->back, 1);
    }
  }
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(number, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
  sigaction(number, &before, nullptr);  // the access is tried again, and ends the process
}

// Once, and never again: a handler that others install later may call this one in its turn.
inline void install() {
  static std::once_flag done;
  std::call_once(done, [] {
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, &before);
  });
}

}  // namespace guard

// Of what is in no cache. std::system_error (EFAULT) where the source has no memory behind it any more; the
// destination's content is worth nothing then. Bus errors elsewhere go to whoever handled them before.
inline void guarded_copy(char *to, const char *from, std::uint64_t nbytes) {
  guard::install();
  guard::Range range;
  range.from = from;
  range.nbytes = nbytes;
  if (sigsetjmp(range.back, 1) != 0) {
    guard::copying = nullptr;
    throw std::system_error(EFAULT, std::generic_category(), "the source of a copy is gone");
  }
  guard::copying = &range;
  std::atomic_signal_fence(std::memory_order_seq_cst);  // the copy stays between the two
  copy_bytes(to, from, nbytes, kColdStreamFrom);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  guard::copying = nullptr;
}

}  // namespace st2i
