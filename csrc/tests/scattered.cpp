// One range of addresses over several blocks: contents, books, threads, and system calls that fail.
#include "../scattered.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace st2i;

namespace {

constexpr auto kOne = static_cast<std::int64_t>(kGranule);

std::uint64_t free_bytes(const Heap &heap) { return heap.statistics().free; }

// Every second granule of a heap that has no others free.
std::vector<std::shared_ptr<Block>> comb(Heap &heap) {
  std::vector<std::shared_ptr<Block>> all;
  while (auto block = heap.allocate(1)) all.push_back(std::move(block));
  std::vector<std::shared_ptr<Block>> kept;
  for (std::size_t i = 1; i < all.size(); i += 2) kept.push_back(all[i]);
  return kept;
}

bool filled(const char *data, std::uint64_t nbytes, char value) {
  for (std::uint64_t i = 0; i < nbytes; i += 577) {
    if (data[i] != value) return false;
  }
  return data[nbytes - 1] == value;
}

int mappings() {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    found += line.find("st2i-arena-scattered") != std::string::npos;
  }
  return found;
}

}  // namespace

TEST(a_large_gap_serves_without_another_mapping) {
  const auto heap = Heap::create(1 << 20, "st2i-arena-scattered", "best_fit", false);
  const auto made = Scattered::allocate(*heap, 3 * kOne - 5);
  CHECK(made->blocks().size() == 1 && made->nbytes == 3 * kGranule - 5);
  CHECK(made->data() == made->blocks()[0]->data() && mappings() == 1);
  CHECK(heap->find(reinterpret_cast<std::uint64_t>(made->data())) == made->blocks()[0]);
}

TEST(several_blocks_are_one_range_of_the_same_memory) {
  for (const char *kind : {"best_fit", "buddy"}) {
    const auto heap = Heap::create(16 * kOne, "st2i-arena-scattered", kind, true);
    auto others = comb(*heap);
    auto made = Scattered::allocate(*heap, 3 * kOne - 5);
    CHECK(made->blocks().size() == 3 && mappings() == 4);
    CHECK(heap->statistics().blocks == 11 && free_bytes(*heap) == 5 * kGranule);
    CHECK(reinterpret_cast<std::uint64_t>(made->data()) % page_size() == 0);
    CHECK(!heap->find(reinterpret_cast<std::uint64_t>(made->data())));
    for (std::uint64_t i = 0; i < made->nbytes; ++i) made->data()[i] = static_cast<char>(i / kGranule + 1);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto &block = made->blocks()[i];
      CHECK(block->nbytes == (i < 2 ? kGranule : kGranule - 5));
      CHECK(filled(block->data(), block->nbytes, static_cast<char>(i + 1)));
    }
    heap->check();
    const auto first = made->blocks()[0]->data();
    made.reset();
    CHECK(mappings() == 1 && free_bytes(*heap) == 8 * kGranule);
    CHECK(filled(first, kGranule, static_cast<char>(kPoison)));
    others.clear();
    CHECK(heap->statistics().largest_free == 16 * kGranule);
    heap->check();
  }
}

TEST(only_too_few_free_bytes_refuse) {
  const auto heap = Heap::create(16 * kOne, "st2i-arena-scattered", "best_fit", false);
  const auto others = comb(*heap);
  CHECK(!Scattered::allocate(*heap, 8 * kOne + 1));
  CHECK(!Scattered::allocate(*heap, INT64_MAX));
  CHECK_THROWS(std::invalid_argument, Scattered::allocate(*heap, 0));
  CHECK_THROWS(std::invalid_argument, Scattered::allocate(*heap, -1));
  CHECK(free_bytes(*heap) == 8 * kGranule);
  const auto all = Scattered::allocate(*heap, 8 * kOne);
  CHECK(all && all->blocks().size() == 8 && free_bytes(*heap) == 0);
  CHECK(!Scattered::allocate(*heap, 1));
}

TEST(pieces_are_as_few_as_possible) {
  for (const char *kind : {"best_fit", "buddy"}) {
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
      const auto allocator = make_allocator(kind, 64 * kOne);
      std::vector<std::uint64_t> live;
      while (const auto offset = allocator->alloc(1 + random() % (6 * kGranule))) live.push_back(*offset);
      std::shuffle(live.begin(), live.end(), random);
      while (live.size() > 4) {
        allocator->free(live.back());
        live.pop_back();
      }
      std::uint64_t n = 1 + random() % (64 * kGranule);
      const Statistics before = allocator->statistics();
      const auto pieces = allocator->alloc_scattered(static_cast<std::int64_t>(n));
      allocator->check();
      CHECK(pieces.has_value() == (granules(n) * kGranule <= before.free));
      if (!pieces) continue;
      CHECK((pieces->size() == 1) == (granules(n) * kGranule <= before.largest_free));
      CHECK(allocator->statistics().blocks == before.blocks + pieces->size());
      std::uint64_t sum = 0;
      for (std::size_t i = 0; i < pieces->size(); ++i) {
        // Longest first, so fewer could not hold it.
        CHECK(i == 0 || (*pieces)[i].nbytes <= (*pieces)[i - 1].nbytes);
        sum += (*pieces)[i].nbytes;
      }
      CHECK(sum == granules(n) * kGranule);
      for (const Piece &piece : *pieces) allocator->free(piece.offset);
      allocator->check();
      CHECK(allocator->statistics().largest_free == before.largest_free);
    }
  }
}

TEST(a_mapping_that_fails_gives_everything_back) {
  const auto heap = Heap::create(16 * kOne, "st2i-arena-scattered", "best_fit", true);
  const auto others = comb(*heap);
  const Statistics before = heap->statistics();
  const std::string path = "/proc/self/fd/" + std::to_string(heap->fd());
  const int saved = fcntl(heap->fd(), F_DUPFD_CLOEXEC, 0), closed = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK(saved >= 0 && closed >= 0 && dup2(closed, heap->fd()) == heap->fd());  // not to be written to
  CHECK_THROWS(std::system_error, Scattered::allocate(*heap, 5 * kOne));
  CHECK(mappings() == 1);
  CHECK(heap->statistics().free == before.free && heap->statistics().blocks == before.blocks);
  heap->check();
  CHECK(dup2(saved, heap->fd()) == heap->fd());
  close(saved);
  close(closed);
  CHECK(Scattered::allocate(*heap, 5 * kOne)->blocks().size() == 5);
}

TEST(memory_that_cannot_be_taken_gives_everything_back) {
  const auto heap = Heap::create(96 << 20, "st2i-arena-scattered", "best_fit", true);
  const auto first = heap->allocate(30 << 20);
  CHECK(heap->taken() == kStep);
  struct stat status{};
  CHECK(fstat(heap->fd(), &status) == 0);
  char *const rest = heap->payload() + kStep;
  const std::uint64_t nbytes = heap->nbytes() - kStep;
  CHECK(munmap(rest, nbytes) == 0);
  CHECK_THROWS(std::system_error, Scattered::allocate(*heap, 40 << 20));
  CHECK(heap->taken() == kStep && heap->statistics().blocks == 1);
  CHECK(mmap(rest, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, heap->fd(),
             status.st_size - static_cast<off_t>(nbytes)) == rest);
  CHECK(Scattered::allocate(*heap, 66 << 20));
  CHECK(heap->taken() == 96 << 20);
  heap->check();
}

TEST(it_keeps_its_heap) {
  auto heap = Heap::create(16 * kOne, "st2i-arena-scattered", "buddy", true);
  auto others = comb(*heap);
  auto made = Scattered::allocate(*heap, 4 * kOne);
  others.clear();
  heap.reset();
  std::memset(made->data(), 1, made->nbytes);
  CHECK(mappings() == 5);
  made.reset();
  CHECK(mappings() == 0);
}

TEST(blocks_and_scattered_ones_from_four_threads) {
  const auto heap = Heap::create(40 * kOne, "st2i-arena-scattered", "best_fit", true);
  std::vector<std::thread> threads;
  std::atomic<int> several{0};
  for (unsigned number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(number);
      std::vector<std::shared_ptr<Block>> blocks;
      std::vector<std::unique_ptr<Scattered>> scattered;
      const auto value = static_cast<char>(number + 1);
      // On until enough were in several blocks: how the threads take turns decides that.
      for (int step = 0; step < 400 || (several <= 20 && step < 40000); ++step) {
        const auto wanted = static_cast<std::int64_t>(1 + random() % (8 * kGranule));
        if (random() % 2) {
          if (auto made = Scattered::allocate(*heap, wanted)) {
            std::memset(made->data(), value, made->nbytes);
            several += made->blocks().size() > 1;
            scattered.push_back(std::move(made));
          }
        } else if (auto made = heap->allocate(wanted)) {
          std::memset(made->data(), value, made->nbytes);
          blocks.push_back(std::move(made));
        }
        while (blocks.size() > 3) {
          const auto victim = blocks.begin() + static_cast<long>(random() % blocks.size());
          CHECK(filled((*victim)->data(), (*victim)->nbytes, value));
          blocks.erase(victim);
        }
        while (scattered.size() > 2) {
          const auto victim = scattered.begin() + static_cast<long>(random() % scattered.size());
          CHECK(filled((*victim)->data(), (*victim)->nbytes, value));
          scattered.erase(victim);
        }
        if (step % 50 == 0) heap->check();
      }
    });
  }
  for (auto &thread : threads) thread.join();
  heap->check();
  CHECK(several > 20);
  CHECK(heap->statistics().blocks == 0 && heap->statistics().largest_free == 40 * kGranule);
  CHECK(mappings() == 1);
}
