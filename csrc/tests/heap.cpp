// Blocks from many threads, and what becomes of them when references die in any order.
#include "../heap.hpp"

#include <set>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace st2i;

TEST(blocks_from_four_threads) {
  const auto heap = Heap::create(64 << 20, "st2i-arena-threads", "best_fit", true);
  std::mutex mutex;
  std::set<std::uint64_t> generations;
  std::uint64_t made = 0;
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(number);
      std::vector<std::shared_ptr<Block>> mine;
      for (int step = 0; step < 600; ++step) {
        if (mine.size() < 6 && random() % 2) {
          const auto block = heap->allocate(1 + random() % (3 * kGranule));
          if (!block) continue;
          std::memset(block->data(), static_cast<int>(number), block->nbytes);
          mine.push_back(block);
          const std::lock_guard lock(mutex);
          generations.insert(block->generation);
          ++made;
        } else if (!mine.empty()) {
          const std::size_t victim = random() % mine.size();
          const auto found =
              heap->find(reinterpret_cast<std::uint64_t>(mine[victim]->data()) + random() % mine[victim]->nbytes);
          CHECK(found == mine[victim]);
          for (std::uint64_t i = 0; i < found->nbytes; i += 977) {
            CHECK(found->data()[i] == static_cast<char>(number));
          }
          mine.erase(mine.begin() + static_cast<long>(victim));
        }
        if (step % 100 == 0) heap->check();
      }
    });
  }
  for (auto &thread : threads) thread.join();
  heap->check();
  CHECK(heap->statistics().blocks == 0);
  CHECK(generations.size() == made && !generations.count(0));
}

TEST(a_block_found_by_one_thread_while_its_owner_drops_it) {
  const auto heap = Heap::create(1 << 20, "st2i-arena-find", "best_fit", false);
  std::atomic<bool> done{false};
  std::thread finder([&] {
    while (!done) {
      const auto block = heap->find(reinterpret_cast<std::uint64_t>(heap->payload()) + 5);
      if (block) CHECK(block->offset == 0 && block->nbytes == kGranule);
    }
  });
  for (int i = 0; i < 3000; ++i) heap->allocate(kGranule);
  done = true;
  finder.join();
  heap->check();
  CHECK(heap->statistics().blocks == 0);
}

TEST(a_block_keeps_its_heap) {
  auto heap = Heap::create(1 << 20, "st2i-arena-kept", "buddy", false);
  auto block = heap->allocate(100);
  heap.reset();
  std::memset(block->data(), 1, block->nbytes);
}

TEST(a_full_heap_and_a_freed_one) {
  const auto heap = Heap::create(2 * kGranule, "st2i-arena-full", "best_fit", true);
  auto first = heap->allocate(kGranule + 1);
  CHECK(first && !heap->allocate(1));
  const std::uint64_t generation = first->generation;
  first.reset();
  const auto second = heap->allocate(2 * kGranule);
  CHECK(second && second->offset == 0 && second->generation != generation);
  CHECK(static_cast<unsigned char>(second->data()[kGranule]) == kPoison);
  CHECK(second->data()[kGranule + 1] == 0);
}

TEST(a_block_is_published_while_it_lives) {
  const auto heap = Heap::create(1 << 20, "st2i-arena-entry", "best_fit", false);
  const Segment seen = Segment::open(getpid(), heap->fd(), "st2i-arena-entry");
  auto block = heap->allocate(1);
  CHECK(seen.generation(block->offset).load() == block->generation);
  const std::uint64_t offset = block->offset;
  block.reset();
  CHECK(seen.generation(offset).load() == 0);
}

TEST(memory_is_taken_in_steps) {
  const auto heap = Heap::create(100 << 20, "st2i-arena-steps", "best_fit", false);
  CHECK(heap->taken() == 0);
  const auto one = heap->allocate(1);
  CHECK(heap->taken() == kStep);
  const auto two = heap->allocate(static_cast<std::int64_t>(kStep));
  CHECK(heap->taken() == 2 * kStep);
  const auto three = heap->allocate(67 << 20);
  CHECK(three && heap->taken() == 100 << 20);  // the last step is shorter
}

TEST(a_block_whose_memory_cannot_be_taken_is_given_back) {
  const auto heap = Heap::create(64 << 20, "st2i-arena-refused", "best_fit", true);
  struct stat status{};
  CHECK(fstat(heap->fd(), &status) == 0);
  CHECK(munmap(heap->payload(), heap->nbytes()) == 0);
  CHECK_THROWS(std::system_error, heap->allocate(1));
  CHECK(heap->taken() == 0 && heap->statistics().blocks == 0);
  CHECK(mmap(heap->payload(), heap->nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, heap->fd(),
             status.st_size - static_cast<off_t>(heap->nbytes())) == heap->payload());
  CHECK(heap->allocate(64 << 20));
  heap->check();
}

TEST(heaps_are_refused) {
  const std::string name = "st2i-arena-no";
  CHECK_THROWS(std::invalid_argument, Heap::create(0, name, "best_fit", false));
  CHECK_THROWS(std::invalid_argument, Heap::create(-1, name, "best_fit", false));
  CHECK_THROWS(std::invalid_argument, Heap::create(INT64_MAX, name, "best_fit", false));
  CHECK_THROWS(std::invalid_argument, Heap::create(kGranule, "", "best_fit", false));
  CHECK_THROWS(std::invalid_argument, Heap::create(kGranule, std::string(201, 'x'), "best_fit", false));
  CHECK_THROWS(std::invalid_argument, Heap::create(kGranule, name, "worst_fit", false));
}
