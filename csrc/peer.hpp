// Another process's heap, mapped for reading. Thread-safe. Outlives its owner.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "heap.hpp"
#include "segment.hpp"
#include "seqlock.hpp"
#include "words.hpp"

namespace st2i {

class Peer {
 public:
  Peer(int pid, int fd, const std::string &name)
      : segment_(Segment::open(pid, fd, name)),
        steps_((segment_.payload_bytes() + kStep - 1) / kStep),
        mapped_(std::make_unique<std::atomic<bool>[]>(steps_)) {}

  std::uint64_t nbytes() const { return segment_.payload_bytes(); }

  // Copies the first `nbytes` of the block at `offset`. False: that block is gone.
  bool get(std::int64_t offset, std::uint64_t generation, std::int64_t nbytes, char *into) {
    if (offset < 0 || nbytes < 1 || static_cast<std::uint64_t>(offset) >= this->nbytes() ||
        static_cast<std::uint64_t>(nbytes) > this->nbytes() - static_cast<std::uint64_t>(offset)) {
      throw std::out_of_range("bytes " + std::to_string(offset) + " to " + std::to_string(offset) +
                              " + " + std::to_string(nbytes) + " are not in a heap of " +
                              std::to_string(this->nbytes()));
    }
    if (offset % static_cast<std::int64_t>(kGranule)) {
      throw std::invalid_argument("no block starts at offset " + std::to_string(offset) +
                                  ", which is not a multiple of " + std::to_string(kGranule));
    }
    if (generation == 0) throw std::invalid_argument("no block has generation 0");
    if (into == nullptr) throw std::invalid_argument("the destination is address 0");
    const auto start = static_cast<std::uint64_t>(offset);
    const auto n = static_cast<std::uint64_t>(nbytes);
    const Generation &entry = segment_.generation(start);
    // First of all: the owner took memory for every block that was ever there, and for nothing else.
    if (!holds(entry, generation)) return false;
    prefault(start, n);
    return read_block(entry, generation, into, segment_.payload() + start, n);
  }

  const Word &word(std::int64_t word) const { return segment_.word(checked_word(word)); }

 private:
  void prefault(std::uint64_t start, std::uint64_t n) {
    for (std::uint64_t step = start / kStep; step <= (start + n - 1) / kStep; ++step) {
      if (mapped_[step].load(std::memory_order_acquire)) continue;
      const std::lock_guard lock(mapping_);
      if (mapped_[step].load(std::memory_order_relaxed)) continue;
      const std::uint64_t at = step * kStep;
      populate(segment_.payload() + at, std::min(kStep, nbytes() - at), Access::read);
      mapped_[step].store(true, std::memory_order_release);
    }
  }

  Segment segment_;
  const std::uint64_t steps_;
  std::mutex mapping_;
  std::unique_ptr<std::atomic<bool>[]> mapped_;  // by step
};

}  // namespace st2i
