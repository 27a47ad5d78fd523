#include "check.hpp"

int main() {
  for (const auto &[name, test] : check::tests()) {
    const int before = check::failures;
    try {
      test();
    } catch (const std::exception &error) {
      check::that(false, error.what(), name.c_str(), 0);
    }
    std::printf("%s %s\n", check::failures == before ? "ok  " : "FAIL", name.c_str());
    std::fflush(stdout);
  }
  return check::failures ? 1 : 0;
}
