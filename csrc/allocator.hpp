// What divides an arena: offsets only, so that the arena may be device memory. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "granule.hpp"

namespace st2i {

struct Statistics {  // bytes, except `blocks`
  std::uint64_t used = 0;  // as rounded by the allocator
  std::uint64_t free = 0;
  std::uint64_t largest_free = 0;  // the largest request that succeeds now
  std::uint64_t blocks = 0;
  std::uint64_t peak = 0;  // of `used`
};

struct Piece {  // bytes; a block of its own
  std::uint64_t offset;
  std::uint64_t nbytes;
};

class Allocator {
 public:
  virtual ~Allocator() = default;

  // Offset of a block of at least `nbytes` >= 1, a multiple of kGranule; none when no gap is
  // large enough.
  std::optional<std::uint64_t> alloc(std::int64_t nbytes) {
    const std::uint64_t n = checked(nbytes);
    if (n > total_) return std::nullopt;
    const auto found = take(n);
    if (!found) return std::nullopt;
    count(*found);
    return found->first * kGranule;
  }

  // Blocks that hold `nbytes` >= 1 together, as few as possible: one where a gap is large enough, else
  // the longest gaps whole and then a part of another. The last is as long as is left to hold. None
  // when all that is free is too little.
  std::optional<std::vector<Piece>> alloc_scattered(std::int64_t nbytes) {
    std::uint64_t n = checked(nbytes);
    if (n > total_ - used_) return std::nullopt;
    std::vector<Piece> pieces;
    while (n > 0) {
      const std::uint64_t part = std::min(n, largest());
      const auto found = take(part);
      invariant(found.has_value(), "the longest gap is not there");
      count(*found);
      pieces.push_back({found->first * kGranule, part * kGranule});
      n -= part;
    }
    return pieces;
  }

  void free(std::uint64_t offset) {
    const std::uint64_t n = offset % kGranule ? 0 : give(offset / kGranule);
    if (!n) {
      throw std::invalid_argument("offset " + std::to_string(offset) +
                                  " is not the start of a live block");
    }
    used_ -= n;
    --blocks_;
  }

  Statistics statistics() const {
    return {used_ * kGranule, (total_ - used_) * kGranule, largest() * kGranule, blocks_,
            peak_ * kGranule};
  }

  std::uint64_t nbytes() const { return total_ * kGranule; }

  // Throws std::logic_error if an invariant is broken.
  virtual void check() const = 0;

 protected:
  struct Range {  // granules
    std::uint64_t first;
    std::uint64_t second;
  };

  explicit Allocator(std::int64_t nbytes) {
    if (nbytes < static_cast<std::int64_t>(kGranule)) {
      throw std::invalid_argument("an arena of " + std::to_string(nbytes) +
                                  " bytes was asked for; the least is " + std::to_string(kGranule));
    }
    total_ = static_cast<std::uint64_t>(nbytes) / kGranule;
  }

  // All in granules. take: start and length of a block that holds n >= 1. give: length of the
  // block that was live at `start`, 0 if none was.
  virtual std::optional<Range> take(std::uint64_t n) = 0;
  virtual std::uint64_t give(std::uint64_t start) = 0;
  virtual std::uint64_t largest() const = 0;

  void check_counts(std::uint64_t used, std::uint64_t free, std::uint64_t blocks) const {
    invariant(used == used_, "used bytes are miscounted");
    invariant(used + free == total_, "bytes are lost or counted twice");
    invariant(blocks == blocks_, "blocks are miscounted");
    invariant(peak_ >= used_ && peak_ <= total_, "the peak is impossible");
  }

  static void invariant(bool holds, const char *broken) {
    if (!holds) throw std::logic_error(broken);
  }

  std::uint64_t total_ = 0;

 private:
  static std::uint64_t checked(std::int64_t nbytes) {
    if (nbytes <= 0) {
      throw std::invalid_argument("a block of " + std::to_string(nbytes) +
                                  " bytes was asked for; the least is 1");
    }
    return granules(static_cast<std::uint64_t>(nbytes));
  }

  void count(const Range &taken) {
    used_ += taken.second;
    if (used_ > peak_) peak_ = used_;
    ++blocks_;
  }

  std::uint64_t used_ = 0, peak_ = 0, blocks_ = 0;
};

}  // namespace st2i
