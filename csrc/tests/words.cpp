// Signal words: order, wake-ups, time-outs, wrapping, and who has which.
#include "../words.hpp"

#include <set>
#include <thread>
#include <vector>

#include "../heap.hpp"
#include "../peer.hpp"
#include "check.hpp"

using namespace st2i;

namespace {
const auto nothing = [] {};
}

TEST(a_signal_carries_what_was_written_before) {
  const std::string name = "st2i-arena-words";
  const auto heap = Heap::create(kGranule, name, "best_fit", false);
  Word &there = heap->word(heap->allocate_word());
  Word &back = heap->word(heap->allocate_word());
  std::uint64_t plain = 0;
  std::thread other([&] {
    for (std::uint32_t i = 1; i <= 2000; ++i) {
      CHECK(wait(there, i, 20, nothing) == i);
      CHECK(plain == i);
      plain = 10 * i;
      signal(back, i);
    }
  });
  for (std::uint32_t i = 1; i <= 2000; ++i) {
    plain = i;
    signal(there, i);
    CHECK(wait(back, i, 20, nothing) == i);
    CHECK(plain == 10 * i);
  }
  other.join();
}

TEST(a_signal_wakes_all_who_wait_on_any_mapping) {
  const std::string name = "st2i-arena-wake";
  const auto heap = Heap::create(kGranule, name, "best_fit", false);
  const std::uint32_t word = heap->allocate_word();
  const Peer peer(getpid(), heap->fd(), name);
  std::vector<std::thread> waiters;
  for (int number = 0; number < 3; ++number) {
    waiters.emplace_back([&] { CHECK(wait(peer.word(word), 1, 20, nothing) == 7u); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto start = std::chrono::steady_clock::now();
  signal(heap->word(word), 7);
  for (auto &waiter : waiters) waiter.join();
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST(a_wait_times_out_and_looks_up_in_between) {
  Word word{4};
  int looks = 0;
  CHECK(!wait(word, 5, 0, nothing));
  const auto start = std::chrono::steady_clock::now();
  CHECK(!wait(word, 5, 0.35, [&] { ++looks; }));
  const auto took = std::chrono::steady_clock::now() - start;
  CHECK(took >= std::chrono::milliseconds(345) && looks >= 3);
  struct Stop {};
  CHECK_THROWS(Stop, wait(word, 5, 60, [] { throw Stop{}; }));
  CHECK_THROWS(std::invalid_argument, wait(word, 5, -1, nothing));
  CHECK_THROWS(std::invalid_argument, wait(word, 5, std::nan(""), nothing));
}

TEST(values_wrap) {
  CHECK(reached(5, 5) && reached(6, 5) && !reached(4, 5));
  CHECK(reached(3, UINT32_MAX - 2) && !reached(UINT32_MAX - 2, 3));
  CHECK(reached(0x80000000u, 1) && !reached(0x80000001u, 1));
}

TEST(every_word_has_one_user) {
  WordTable table;
  std::mutex mutex;
  std::set<std::uint32_t> held;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const std::uint32_t word = table.allocate();
        {
          const std::lock_guard lock(mutex);
          CHECK(held.insert(word).second);
        }
        if (i % 3) continue;
        {
          const std::lock_guard lock(mutex);
          held.erase(word);
        }
        table.free(word);
      }
    });
  }
  for (auto &thread : threads) thread.join();
  table.check();
  CHECK(held.size() == 800);
}

TEST(words_are_refused) {
  WordTable table;
  CHECK_THROWS(std::invalid_argument, table.checked(0));
  CHECK(table.allocate() == 0 && table.checked(0) == 0);
  table.free(0);
  CHECK_THROWS(std::invalid_argument, table.free(0));
  CHECK_THROWS(std::out_of_range, table.free(-1));
  CHECK_THROWS(std::out_of_range, table.free(kWords));
  for (std::uint32_t i = 0; i < kWords; ++i) table.allocate();
  CHECK_THROWS(std::runtime_error, table.allocate());
  table.free(77);
  CHECK(table.allocate() == 77);
  CHECK_THROWS(std::invalid_argument, checked_value(-1));
  CHECK_THROWS(std::invalid_argument, checked_value(std::int64_t{1} << 32));
}
