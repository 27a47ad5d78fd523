// Reading a block that its owner may free and reuse meanwhile, without ever taking that for the block.
//
// The owner: generation published, contents written, ticket sent; later generation retracted, memory
// reused. A reader looks at the generation before and after its copy: the same nonzero value both
// times means that no byte was of a later block.
#pragma once

#include <cstdint>

#include "copy.hpp"
#include "segment.hpp"

namespace st2i {

// The copy races with the next owner of the memory, deliberately; the generation tells.
inline void racing_copy(char *to, const char *from, std::uint64_t nbytes) {
#ifdef __SANITIZE_THREAD__
  for (std::uint64_t i = 0; i < nbytes; ++i) to[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
#else
  copy_bytes(to, from, nbytes);
#endif
}

inline void publish(Generation &entry, std::uint64_t generation) {
  entry.store(generation, std::memory_order_release);
}

// No write of the memory's next owner, not even a non-temporal one, is seen before this.
inline void retract(Generation &entry) {
  entry.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

inline bool holds(const Generation &entry, std::uint64_t generation) {
  return entry.load(std::memory_order_acquire) == generation;
}

// False: the block is gone, and `to` is worth nothing.
inline bool read_block(const Generation &entry, std::uint64_t generation, char *to, const char *from,
                       std::uint64_t nbytes) {
  if (!holds(entry, generation)) return false;
  racing_copy(to, from, nbytes);
  std::atomic_thread_fence(std::memory_order_acquire);
  return entry.load(std::memory_order_relaxed) == generation;
}

}  // namespace st2i
