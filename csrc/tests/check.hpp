// What the tests need: TEST registers, CHECK and CHECK_THROWS report and fail the run.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace check {

inline std::vector<std::pair<std::string, void (*)()>> &tests() {
  static std::vector<std::pair<std::string, void (*)()>> all;
  return all;
}

inline std::atomic<int> failures{0};

inline void that(bool holds, const char *what, const char *file, int line) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
}

inline bool add(const char *name, void (*test)()) {
  tests().emplace_back(name, test);
  return true;
}

}  // namespace check

#define TEST(name)                                                \
  static void name();                                             \
  static const bool name##_added = check::add(#name, &name);      \
  static void name()

#define CHECK(...) check::that(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

#define CHECK_THROWS(type, ...)                                   \
  do {                                                            \
    bool thrown = false;                                          \
    try {                                                         \
      static_cast<void>(__VA_ARGS__);                             \
    } catch (const type &) {                                      \
      thrown = true;                                              \
    }                                                             \
    check::that(thrown, #__VA_ARGS__ " throws " #type, __FILE__, __LINE__); \
  } while (false)
