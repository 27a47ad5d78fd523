// Best fit with coalescing: the smallest gap that is large enough, the lowest among equals.
#pragma once

#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "allocator.hpp"

namespace st2i {

class BestFit final : public Allocator {
 public:
  explicit BestFit(std::int64_t nbytes) : Allocator(nbytes) { add(0, total_); }

  void check() const override {
    std::uint64_t free = 0, used = 0;
    std::map<std::uint64_t, std::uint64_t> all(gaps_);
    for (const auto &[start, n] : gaps_) {
      free += n;
      invariant(by_size_.count({n, start}) == 1, "a gap is not in the index by size");
    }
    for (const auto &[start, n] : live_) {
      used += n;
      invariant(all.emplace(start, n).second, "a live block starts where a gap starts");
    }
    invariant(by_size_.size() == gaps_.size(), "the index by size has a gap that does not exist");
    std::uint64_t end = 0;
    bool after_gap = false;
    for (const auto &[start, n] : all) {
      invariant(start == end && n > 0, "blocks and gaps overlap or leave a hole");
      const bool gap = gaps_.count(start) == 1;
      invariant(!(gap && after_gap), "two gaps that touch are not one");
      after_gap = gap;
      end = start + n;
    }
    invariant(end == total_, "blocks and gaps do not cover the arena");
    check_counts(used, free, live_.size());
  }

 protected:
  std::optional<Range> take(std::uint64_t n) override {
    const auto fit = by_size_.lower_bound({n, 0});
    if (fit == by_size_.end()) return std::nullopt;
    const auto [size, start] = *fit;
    by_size_.erase(fit);
    gaps_.erase(start);
    if (size > n) add(start + n, size - n);
    live_.emplace(start, n);
    return Range{start, n};
  }

  std::uint64_t give(std::uint64_t start) override {
    const auto block = live_.find(start);
    if (block == live_.end()) return 0;
    const std::uint64_t freed = block->second;
    live_.erase(block);
    std::uint64_t n = freed;
    auto next = gaps_.lower_bound(start);
    if (next != gaps_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        start = before->first;
        n += before->second;
        remove(before);
      }
    }
    if (next != gaps_.end() && next->first == start + n) {
      n += next->second;
      remove(next);
    }
    add(start, n);
    return freed;
  }

  std::uint64_t largest() const override {
    return by_size_.empty() ? 0 : by_size_.rbegin()->first;
  }

 private:
  using Gaps = std::map<std::uint64_t, std::uint64_t>;

  void add(std::uint64_t start, std::uint64_t n) {
    gaps_.emplace(start, n);
    by_size_.emplace(n, start);
  }

  void remove(Gaps::const_iterator gap) {
    by_size_.erase({gap->second, gap->first});
    gaps_.erase(gap);
  }

  Gaps gaps_;                                                    // start -> length
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;    // (length, start)
  std::unordered_map<std::uint64_t, std::uint64_t> live_;        // start -> length
};

}  // namespace st2i
