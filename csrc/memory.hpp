// Memory of the machine, and taking pages before anybody's copy has to.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <system_error>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace st2i {

[[noreturn]] inline void throw_errno(const std::string &what) {
  throw std::system_error(errno, std::generic_category(), what);
}

inline std::uint64_t page_size() {
  static const auto size = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Bytes that this process may have at most: physical memory, or the container's limit.
inline std::uint64_t memory_limit() {
  std::uint64_t limit = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_size();
  std::uint64_t container = 0;  // the file says "max" where there is none
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> container) limit = std::min(limit, container);
  return limit;
}

enum class Access { read, write };

// Maps the pages of [start, start + nbytes), backed by memory; start is page-aligned. Contents stay.
inline void populate(char *start, std::uint64_t nbytes, Access access) {
  const int advice = access == Access::write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  int rc;
  do {
    rc = madvise(start, nbytes, advice);
  } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
  if (rc == 0) return;
  if (errno != EINVAL) throw_errno("cannot take " + std::to_string(nbytes) + " bytes of memory");
  // Linux before 5.14. A read brings in a shared page as well as a write does.
  for (std::uint64_t i = 0; i < nbytes; i += page_size()) {
    static_cast<void>(*static_cast<volatile char *>(start + i));
  }
}

}  // namespace st2i
