// Another process's heap, mapped for reading. Thread-safe. Outlives its owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "segment.hpp"
#include "seqlock.hpp"
#include "words.hpp"

namespace st2i {

class Peer {
 public:
  Peer(int pid, int fd, const std::string &name)
      : segment_(Segment::open(pid, fd, name)),
        mapped_(std::make_unique<std::atomic<bool>[]>(segment_.payload_bytes() / kGranule)) {}

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
  // So that the copy pays no page faults; two threads may do the same at once.
  void prefault(std::uint64_t start, std::uint64_t n) {
    std::uint64_t first = start / kGranule, end = first + granules(n);
    while (first < end && mapped_[first].load(std::memory_order_relaxed)) ++first;
    while (first < end && mapped_[end - 1].load(std::memory_order_relaxed)) --end;
    if (first == end) return;
    populate(segment_.payload() + first * kGranule, (end - first) * kGranule, Access::read);
    for (; first < end; ++first) mapped_[first].store(true, std::memory_order_relaxed);
  }

  Segment segment_;
  std::unique_ptr<std::atomic<bool>[]> mapped_;  // by granule
};

}  // namespace st2i
