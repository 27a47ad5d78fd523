// A process's own part of the symmetric heap, and its blocks. Thread-safe.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocators.hpp"
#include "segment.hpp"
#include "seqlock.hpp"
#include "words.hpp"

namespace st2i {

inline constexpr std::uint64_t kStep = 32 << 20;  // memory is taken in such steps, bytes
inline constexpr unsigned char kPoison = 0xDB;

class Heap;

// Memory of a heap; freed with its last reference, which also keeps the heap.
class Block {
 public:
  Block(std::shared_ptr<Heap> heap, std::uint64_t offset, std::uint64_t nbytes,
        std::uint64_t generation)
      : offset(offset), nbytes(nbytes), generation(generation), heap_(std::move(heap)) {}
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;
  inline ~Block();

  inline char *data() const;

  const std::uint64_t offset;      // bytes from the start of the payload
  const std::uint64_t nbytes;      // as asked for
  const std::uint64_t generation;  // nonzero, never the same twice in a heap

 private:
  std::shared_ptr<Heap> heap_;
};

class Heap : public std::enable_shared_from_this<Heap> {
 public:
  static std::shared_ptr<Heap> create(std::int64_t nbytes, const std::string &name,
                                      const std::string &allocator, bool poison) {
    const std::uint64_t limit = memory_limit();
    if (nbytes < static_cast<std::int64_t>(kGranule) || static_cast<std::uint64_t>(nbytes) > limit) {
      throw std::invalid_argument("a heap of " + std::to_string(nbytes) +
                                  " bytes was asked for; it has at least " +
                                  std::to_string(kGranule) + " (a granule) and at most " +
                                  std::to_string(limit) + " (the memory of this machine)");
    }
    return std::shared_ptr<Heap>(new Heap(nbytes, name, allocator, poison));
  }

  const std::string &name() const { return name_; }
  int pid() const { return pid_; }
  int fd() const { return segment_.fd(); }
  std::uint64_t nbytes() const { return segment_.payload_bytes(); }
  char *payload() const { return segment_.payload(); }

  // A block of `nbytes` >= 1; null when no gap is large enough.
  std::shared_ptr<Block> allocate(std::int64_t nbytes) {
    expect_owner();
    std::shared_ptr<Block> block;
    {
      const std::lock_guard lock(mutex_);
      const auto offset = allocator_->alloc(nbytes);
      if (!offset) return nullptr;
      block = add(*offset, static_cast<std::uint64_t>(nbytes));
    }
    ready(*block);
    return block;
  }

  // Blocks of `nbytes` >= 1 together, as few as possible; none when all free bytes are too few. All but
  // the last have whole granules. See scattered.hpp.
  std::vector<std::shared_ptr<Block>> allocate_pieces(std::int64_t nbytes) {
    expect_owner();
    // Outlives the lock: a block that dies takes it.
    std::vector<std::shared_ptr<Block>> blocks;
    {
      const std::lock_guard lock(mutex_);
      const auto pieces = allocator_->alloc_scattered(nbytes);
      if (!pieces) return blocks;
      blocks.reserve(pieces->size());
      auto left = static_cast<std::uint64_t>(nbytes);
      for (const Piece &piece : *pieces) {
        blocks.push_back(add(piece.offset, std::min(left, piece.nbytes)));
        left -= blocks.back()->nbytes;
      }
    }
    for (const auto &block : blocks) ready(*block);
    return blocks;
  }

  // Maps a block at another address, too; `at` is page-aligned and has room for its granules.
  void map_again(const Block &block, char *at) const {
    segment_.map_again(at, block.offset, granules(block.nbytes) * kGranule);
  }

  // The live block that contains the address.
  std::shared_ptr<Block> find(std::uint64_t address) const {
    const auto start = reinterpret_cast<std::uint64_t>(payload());
    if (address < start || address - start >= nbytes()) return nullptr;
    std::shared_ptr<Block> block;
    {
      const std::lock_guard lock(mutex_);
      auto next = live_.upper_bound(address - start);
      // None where its last reference is just going.
      if (next != live_.begin()) block = std::prev(next)->second.lock();
    }
    // Outside of the lock: this may be the last reference by now.
    return block && address - start < block->offset + block->nbytes ? block : nullptr;
  }

  Statistics statistics() const {
    const std::lock_guard lock(mutex_);
    return allocator_->statistics();
  }

  // Bytes of payload that memory was taken for.
  std::uint64_t taken() const { return taken_.load(std::memory_order_acquire); }

  std::uint32_t allocate_word() {
    expect_owner();
    const std::uint32_t word = words_.allocate();
    segment_.word(word).store(0, std::memory_order_release);
    return word;
  }
  void free_word(std::int64_t word) { words_.free(word); }
  Word &word(std::int64_t word) const { return segment_.word(words_.checked(word)); }

  void check() const {
    words_.check();
    const std::lock_guard lock(mutex_);
    allocator_->check();
    if (allocator_->statistics().blocks != live_.size()) {
      throw std::logic_error("a block is allocated and not alive, or alive and not allocated");
    }
    for (const auto &[offset, weak] : live_) {
      const std::uint64_t entry = segment_.generation(offset).load(std::memory_order_acquire);
      if (entry > last_generation_) throw std::logic_error("a generation was never given out");
    }
  }

 private:
  friend class Block;

  Heap(std::int64_t nbytes, const std::string &name, const std::string &allocator, bool poison)
      : name_(name),
        pid_(getpid()),
        poison_(poison),
        allocator_(make_allocator(allocator, nbytes)),
        segment_(Segment::create(name, allocator_->nbytes())) {}

  // A forked child sees the memory, but has only a copy of the books.
  bool is_owner() const { return getpid() == pid_; }

  void expect_owner() const {
    if (!is_owner()) {
      throw std::runtime_error("heap " + name_ + " belongs to process " + std::to_string(pid_) +
                               "; this is process " + std::to_string(getpid()) +
                               ", a fork of it, and needs a heap of its own");
    }
  }

  // Under the lock.
  std::shared_ptr<Block> add(std::uint64_t offset, std::uint64_t nbytes) {
    auto block = std::make_shared<Block>(shared_from_this(), offset, nbytes, ++last_generation_);
    live_[offset] = block;
    return block;
  }

  void ready(const Block &block) {
    take(block.offset + block.nbytes);
    publish(segment_.generation(block.offset), block.generation);
  }

  void release(const Block &block) noexcept {
    if (!is_owner()) return;
    retract(segment_.generation(block.offset));
    // Not where taking its memory has failed.
    const bool taken_all = block.offset + block.nbytes <= taken();
    if (poison_ && taken_all) std::memset(block.data(), kPoison, block.nbytes);
    const std::lock_guard lock(mutex_);
    live_.erase(block.offset);
    allocator_->free(block.offset);
  }

  // Takes memory up to payload offset `end` and to the end of that step.
  void take(std::uint64_t end) {
    if (end <= taken()) return;
    const std::lock_guard lock(taking_);
    const std::uint64_t start = taken();
    if (end <= start) return;
    const std::uint64_t stop = std::min(nbytes(), (end + kStep - 1) / kStep * kStep);
    populate(payload() + start, stop - start, Access::write);
    taken_.store(stop, std::memory_order_release);
  }

  const std::string name_;
  const int pid_;
  const bool poison_;
  mutable std::mutex mutex_;  // allocator_, live_, last_generation_
  std::unique_ptr<Allocator> allocator_;
  std::map<std::uint64_t, std::weak_ptr<Block>> live_;  // by offset
  std::uint64_t last_generation_ = 0;
  Segment segment_;
  WordTable words_;
  std::mutex taking_;
  std::atomic<std::uint64_t> taken_{0};
};

inline Block::~Block() { heap_->release(*this); }
inline char *Block::data() const { return heap_->payload() + offset; }

}  // namespace st2i
