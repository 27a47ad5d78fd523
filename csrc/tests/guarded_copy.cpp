// Copies from files that shrink: an error, from any thread, and the next copy works.
#include "../guarded_copy.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace st2i;

namespace {

constexpr std::uint64_t kBytes = 16 << 20;

struct Mapped {
  int fd = memfd_create("st2i-test", 0);
  char *start;
  Mapped() {
    CHECK(ftruncate(fd, kBytes) == 0);
    start = static_cast<char *>(mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0));
    CHECK(start != MAP_FAILED);
  }
  void cut(std::uint64_t nbytes) const { CHECK(ftruncate(fd, static_cast<off_t>(nbytes)) == 0); }
  ~Mapped() {
    munmap(start, kBytes);
    close(fd);
  }
};

bool copied(std::vector<char> &to, const Mapped &from) {
  try {
    guarded_copy(to.data(), from.start, kBytes);
    return true;
  } catch (const std::system_error &error) {
    CHECK(error.code().value() == EFAULT);
    return false;
  }
}

}  // namespace

TEST(what_was_cut_off_is_an_error_and_the_rest_is_there) {
  const Mapped file;
  std::vector<char> to(kBytes, 'x');
  CHECK(copied(to, file));
  CHECK(to.front() == 0 && to.back() == 0);
  file.cut(kBytes / 2);
  for (int round = 0; round < 3; ++round) CHECK(!copied(to, file));
  guarded_copy(to.data(), file.start, kBytes / 2);
  file.cut(kBytes);
  CHECK(copied(to, file));
}

TEST(files_are_cut_while_threads_copy) {
  const Mapped cut, whole;
  std::atomic<bool> stop{false};
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number) {
    threads.emplace_back([&] {
      std::vector<char> to(kBytes);
      while (!stop) {
        failed += copied(to, cut) ? 0 : 1;
        CHECK(copied(to, whole));
      }
    });
  }
  for (int round = 0; round < 50; ++round) {
    cut.cut(round % 2 == 0 ? kBytes / 3 : kBytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop = true;
  for (std::thread &thread : threads) thread.join();
  CHECK(failed > 0);
}
