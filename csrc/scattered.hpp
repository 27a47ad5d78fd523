// Memory of a heap that is one range of addresses in its own process and several blocks in the heap: for
// what only this process uses. Where no gap is large enough, it takes several.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "heap.hpp"

namespace st2i {

// Freed when it dies; keeps its heap. Every call from any thread.
class Scattered {
 public:
  // `nbytes` >= 1; null when all that is free in the heap is too little. system_error: the process may
  // have no more mappings, or the machine has no memory left; nothing is kept then.
  static std::unique_ptr<Scattered> allocate(Heap &heap, std::int64_t nbytes) {
    auto blocks = heap.allocate_pieces(nbytes);
    if (blocks.empty()) return nullptr;
    std::unique_ptr<Scattered> made(new Scattered(std::move(blocks), static_cast<std::uint64_t>(nbytes)));
    if (made->blocks_.size() > 1) made->map(heap);
    return made;
  }

  Scattered(const Scattered &) = delete;
  Scattered &operator=(const Scattered &) = delete;
  // Also in a forked child: its mapping is its own, and its blocks free nothing.
  ~Scattered() {
    if (range_) munmap(range_, mapped_);
  }

  // A multiple of the page size.
  char *data() const { return range_ ? range_ : blocks_.front()->data(); }
  const std::vector<std::shared_ptr<Block>> &blocks() const { return blocks_; }

  const std::uint64_t nbytes;  // as asked for

 private:
  Scattered(std::vector<std::shared_ptr<Block>> blocks, std::uint64_t nbytes)
      : nbytes(nbytes), blocks_(std::move(blocks)) {}

  void map(const Heap &heap) {
    // Whole granules: the pieces fill it to the last page.
    const std::uint64_t total = granules(nbytes) * kGranule;
    void *at = mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw_errno("cannot reserve " + std::to_string(total) + " bytes of addresses");
    range_ = static_cast<char *>(at);
    mapped_ = total;
    char *next = range_;
    for (const auto &block : blocks_) {
      heap.map_again(*block, next);
      next += granules(block->nbytes) * kGranule;
    }
    populate(range_, mapped_, Access::write);  // here, and not fault by fault in a copy
  }

  std::vector<std::shared_ptr<Block>> blocks_;
  char *range_ = nullptr;  // where there are several blocks
  std::uint64_t mapped_ = 0;
};

}  // namespace st2i
