// Readers of memory that is freed and reused under them: what they accept is never another block's.
#include "../seqlock.hpp"

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "../heap.hpp"
#include "../peer.hpp"
#include "check.hpp"

using namespace st2i;

namespace {

// What a block's next owner does to memory that a reader may still copy: the other half of the
// deliberate race.
void racing_fill(char *to, unsigned char value, std::uint64_t nbytes) {
#ifdef __SANITIZE_THREAD__
  for (std::uint64_t i = 0; i < nbytes; ++i) __atomic_store_n(to + i, value, __ATOMIC_RELAXED);
#else
  std::memset(to, value, nbytes);
#endif
}

bool all_are(const std::vector<char> &bytes, std::uint64_t generation) {
  for (const char byte : bytes) {
    if (byte != static_cast<char>(generation)) return false;
  }
  return true;
}

}  // namespace

TEST(readers_in_the_same_memory) {
  constexpr std::uint64_t kBytes = 4096;
  Generation entry{0};
  std::vector<char> block(kBytes);
  std::atomic<std::uint64_t> ticket{0};
  std::atomic<bool> done{false};
  std::atomic<int> good{0};
  std::vector<std::thread> readers;
  for (int number = 0; number < 2; ++number) {
    readers.emplace_back([&] {
      std::vector<char> copy(kBytes);
      while (!done) {
        const std::uint64_t generation = ticket.load(std::memory_order_acquire);
        if (!generation || !read_block(entry, generation, copy.data(), block.data(), kBytes)) continue;
        CHECK(all_are(copy, generation));
        ++good;
      }
    });
  }
  for (std::uint64_t generation = 1; generation < 2000 || good < 20; ++generation) {
    racing_fill(block.data(), static_cast<unsigned char>(generation), kBytes);
    publish(entry, generation);
    ticket.store(generation, std::memory_order_release);
    // Long enough for a reader to get through, where there are fewer cores than threads too.
    if (generation % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    retract(entry);
  }
  done = true;
  for (auto &reader : readers) reader.join();
}

TEST(peers_of_a_heap_that_reuses_and_poisons) {
  struct Ticket {
    std::uint64_t offset, generation;
  };
  constexpr std::uint64_t kBytes = 3 * kGranule;
  const std::string name = "st2i-arena-reuse";
  const auto heap = Heap::create(4 * kBytes, name, "best_fit", true);
  Peer peer(getpid(), heap->fd(), name);
  std::mutex mutex;
  Ticket last{0, 0};
  std::atomic<bool> done{false};
  std::atomic<int> good{0}, gone{0};
  std::vector<std::thread> readers;
  for (int number = 0; number < 2; ++number) {
    readers.emplace_back([&] {
      std::vector<char> copy(kBytes);
      while (!done) {
        Ticket ticket{};
        {
          const std::lock_guard lock(mutex);
          ticket = last;
        }
        if (!ticket.generation) continue;
        if (peer.get(static_cast<std::int64_t>(ticket.offset), ticket.generation, kBytes, copy.data())) {
          CHECK(all_are(copy, ticket.generation));
          ++good;
        } else {
          ++gone;
        }
      }
    });
  }
  for (int i = 0; i < 300 || (i < 30000 && (good < 20 || gone < 20)); ++i) {
    const auto block = heap->allocate(kBytes);
    racing_fill(block->data(), static_cast<unsigned char>(block->generation), kBytes);
    {
      const std::lock_guard lock(mutex);
      last = {block->offset, block->generation};
    }
    // Now and then long enough for a reader to get through; else the block is gone under it.
    if (i % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  done = true;
  for (auto &reader : readers) reader.join();
  CHECK(good >= 20 && gone >= 20);
}

TEST(a_peer_checks_its_arguments) {
  const std::string name = "st2i-arena-bounds";
  const auto heap = Heap::create(4 * kGranule, name, "best_fit", false);
  const auto block = heap->allocate(kGranule);
  std::vector<char> into(4 * kGranule);
  Peer peer(getpid(), heap->fd(), name);
  const std::uint64_t g = block->generation;
  CHECK(peer.get(0, g, kGranule, into.data()));
  CHECK(!peer.get(0, g + 1, kGranule, into.data()));
  CHECK(!peer.get(kGranule, g, kGranule, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(-65536, g, 1, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(4 * kGranule, g, 1, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(0, g, 0, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(0, g, -1, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(3 * kGranule, g, kGranule + 1, into.data()));
  CHECK_THROWS(std::out_of_range, peer.get(kGranule, g, INT64_MAX, into.data()));
  CHECK_THROWS(std::invalid_argument, peer.get(1, g, 1, into.data()));
  CHECK_THROWS(std::invalid_argument, peer.get(0, 0, 1, into.data()));
  CHECK_THROWS(std::invalid_argument, peer.get(0, g, 1, nullptr));
  CHECK_THROWS(std::system_error, Peer(getpid(), heap->fd(), "st2i-arena-other"));
  CHECK_THROWS(std::system_error, Peer(getpid(), 9999, name));
  CHECK_THROWS(std::system_error, Peer(-1, heap->fd(), name));
}
