// The one macro the C++ tests need, and a loop that waits for something that other threads do.
#ifndef SMP_TF_TESTS_OPS_CC_CHECK_H_
#define SMP_TF_TESTS_OPS_CC_CHECK_H_

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

// Says what was expected, and ends the process without the exit handlers of a forked child.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      _exit(1);                                                                          \
    }                                                                                    \
  } while (false)

#endif  // SMP_TF_TESTS_OPS_CC_CHECK_H_
