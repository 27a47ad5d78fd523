// Random steps of both allocators: no overlap, nothing lost, everything one gap again at the end.
#include "../allocators.hpp"

#include <map>
#include <random>

#include "check.hpp"

using namespace st2i;

namespace {

void random_steps(const std::string &kind, std::uint64_t arena, int steps, unsigned seed) {
  const auto allocator = make_allocator(kind, static_cast<std::int64_t>(arena));
  const std::uint64_t untouched = allocator->statistics().largest_free;
  std::mt19937 random(seed);
  std::map<std::uint64_t, std::uint64_t> live;  // offset -> bytes
  for (int step = 0; step < steps; ++step) {
    if (live.empty() || random() % 5 < 3) {
      const std::int64_t nbytes = 1 + random() % (random() % 8 ? 4 * kGranule : arena / 3);
      const std::uint64_t largest = allocator->statistics().largest_free;
      const auto offset = allocator->alloc(nbytes);
      CHECK(offset.has_value() == (static_cast<std::uint64_t>(nbytes) <= largest));
      if (!offset) continue;
      const auto next = live.lower_bound(*offset);
      CHECK(next == live.end() || *offset + static_cast<std::uint64_t>(nbytes) <= next->first);
      CHECK(next == live.begin() ||
            std::prev(next)->first + std::prev(next)->second <= *offset);
      CHECK(*offset + static_cast<std::uint64_t>(nbytes) <= arena);
      live[*offset] = static_cast<std::uint64_t>(nbytes);
    } else {
      const auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
      CHECK_THROWS(std::invalid_argument, allocator->free(victim->first + 1));
      allocator->free(victim->first);
      live.erase(victim);
    }
    if (step % 16 == 0) allocator->check();
    CHECK(allocator->statistics().blocks == live.size());
  }
  for (const auto &[offset, nbytes] : live) allocator->free(offset);
  allocator->check();
  const Statistics end = allocator->statistics();
  CHECK(end.used == 0 && end.blocks == 0 && end.free == arena && end.largest_free == untouched);
  CHECK_THROWS(std::invalid_argument, allocator->free(0));
}

}  // namespace

TEST(best_fit_random_steps) { random_steps("best_fit", 301 * kGranule, 6000, 1); }
TEST(buddy_random_steps) { random_steps("buddy", 301 * kGranule, 6000, 2); }
TEST(buddy_of_a_power_of_two) { random_steps("buddy", 256 * kGranule, 3000, 3); }
TEST(arena_of_one_granule) {
  random_steps("best_fit", kGranule, 100, 4);
  random_steps("buddy", kGranule, 100, 5);
}

TEST(best_fit_takes_the_smallest_gap_and_the_lowest_of_equals) {
  BestFit arena(100 * kGranule);
  std::uint64_t at[7];
  const std::int64_t sizes[7] = {3, 1, 2, 1, 2, 1, 4};
  for (int i = 0; i < 7; ++i) at[i] = *arena.alloc(sizes[i] * static_cast<std::int64_t>(kGranule));
  for (const int i : {0, 2, 4}) arena.free(at[i]);
  CHECK(*arena.alloc(2 * kGranule) == at[2]);
  CHECK(*arena.alloc(2 * kGranule) == at[4]);
  CHECK(*arena.alloc(2 * kGranule) == at[0]);
  arena.check();
}

TEST(sizes_are_refused) {
  for (const char *kind : {"best_fit", "buddy"}) {
    CHECK_THROWS(std::invalid_argument, make_allocator(kind, 0));
    CHECK_THROWS(std::invalid_argument, make_allocator(kind, -1));
    CHECK_THROWS(std::invalid_argument, make_allocator(kind, kGranule - 1));
    const auto arena = make_allocator(kind, 3 * kGranule);
    CHECK_THROWS(std::invalid_argument, arena->alloc(0));
    CHECK_THROWS(std::invalid_argument, arena->alloc(INT64_MIN));
    CHECK(!arena->alloc(INT64_MAX));
  }
  CHECK_THROWS(std::invalid_argument, make_allocator("first_fit", kGranule));
}
