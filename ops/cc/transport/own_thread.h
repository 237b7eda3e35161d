// A thread of the transport's own, which takes no signals: those are for the threads of the
// program.
#ifndef SMP_TF_OPS_CC_TRANSPORT_OWN_THREAD_H_
#define SMP_TF_OPS_CC_TRANSPORT_OWN_THREAD_H_

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace smp {

// Starts a thread that runs `body`. The system shows it under `name`, of at most 15 characters.
// Throws std::system_error where there can be no thread.
template <typename Body>
std::thread StartOwnThread(const char* name, Body body) {
  struct Masked {
    Masked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Masked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } masked;
  return std::thread([name, body = std::move(body)] {
    pthread_setname_np(pthread_self(), name);
    body();
  });
}

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_OWN_THREAD_H_
