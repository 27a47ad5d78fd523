// The paper's buddy allocator: blocks are powers of two of granules and lie at multiples of their size.
#pragma once

#include <bit>
#include <set>
#include <unordered_map>
#include <vector>

#include "allocator.hpp"

namespace st2i {

class Buddy final : public Allocator {
 public:
  explicit Buddy(std::int64_t nbytes) : Allocator(nbytes), gaps_(std::bit_width(total_)) {
    // An arena of any size is a row of powers of two, largest first.
    for (std::uint64_t start = 0; start < total_;) {
      const int order = std::bit_width(total_ - start) - 1;
      gaps_[order].insert(start);
      start += size(order);
    }
  }

  void check() const override {
    std::uint64_t free = 0, used = 0;
    std::set<std::uint64_t> starts;
    std::set<std::uint64_t> ends;
    const auto cover = [&](std::uint64_t start, int order) {
      invariant(start % size(order) == 0, "a block is not at a multiple of its size");
      invariant(start + size(order) <= total_, "a block is outside of the arena");
      invariant(starts.insert(start).second && ends.insert(start + size(order)).second,
                "blocks and gaps overlap");
    };
    for (int order = 0; order < orders(); ++order) {
      for (const std::uint64_t start : gaps_[order]) {
        free += size(order);
        cover(start, order);
        invariant(order + 1 == orders() || !gaps_[order].count(start ^ size(order)),
                  "two free buddies are not one");
      }
    }
    for (const auto &[start, order] : live_) {
      used += size(order);
      cover(start, order);
    }
    // Together with the sum of sizes: every end but the last is the next one's start.
    for (const std::uint64_t end : ends) {
      invariant(end == total_ || starts.count(end) == 1, "blocks and gaps leave a hole");
    }
    check_counts(used, free, live_.size());
  }

 protected:
  std::optional<Range> take(std::uint64_t n) override {
    const int wanted = std::bit_width(n - 1);
    int order = wanted;
    while (order < orders() && gaps_[order].empty()) ++order;
    if (order >= orders()) return std::nullopt;
    const std::uint64_t start = *gaps_[order].begin();
    gaps_[order].erase(gaps_[order].begin());
    while (order > wanted) {
      --order;
      gaps_[order].insert(start + size(order));
    }
    live_.emplace(start, wanted);
    return Range{start, size(wanted)};
  }

  std::uint64_t give(std::uint64_t start) override {
    const auto block = live_.find(start);
    if (block == live_.end()) return 0;
    int order = block->second;
    const std::uint64_t freed = size(order);
    live_.erase(block);
    while (order + 1 < orders() && gaps_[order].erase(start ^ size(order))) {
      start &= ~size(order);
      ++order;
    }
    gaps_[order].insert(start);
    return freed;
  }

  std::uint64_t largest() const override {
    for (int order = orders(); order-- > 0;) {
      if (!gaps_[order].empty()) return size(order);
    }
    return 0;
  }

 private:
  static constexpr std::uint64_t size(int order) { return std::uint64_t{1} << order; }
  int orders() const { return static_cast<int>(gaps_.size()); }

  std::vector<std::set<std::uint64_t>> gaps_;     // by order: starts
  std::unordered_map<std::uint64_t, int> live_;   // start -> order
};

}  // namespace st2i
