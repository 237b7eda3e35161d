// Lets a process that a signal ends while it waits for other ranks say for whom it waited.
//
//   SIGTERM ─▶ Guardian ─▶ whoever is in Wait ─▶ Say(words) ─▶ one line on stderr ─▶ the signal's
//   end
//                  └────────── nobody has words within kWordsTime ────────┘
#ifndef SMP_TF_OPS_CC_TRANSPORT_START_GUARD_H_
#define SMP_TF_OPS_CC_TRANSPORT_START_GUARD_H_

#include <condition_variable>
#include <mutex>
#include <string>

#include "transport/guardian.h"

namespace smp {

class StartGuard {
 public:
  // `about` names the process in the line of one that has no words in time.
  explicit StartGuard(std::string about);

  // Leaves signals as they were, and wakes who waits. A process that heard one ends all the same.
  void Close();

  // Waits for so many seconds, for a signal that ends the process, or until Close. Returns whether
  // a signal has come that nobody has words for yet.
  bool Wait(double seconds);
  // The line with which a process ends that heard a signal.
  void Say(const std::string& words);

 private:
  void OnSignal(const std::string& what, int exit_code);

  const std::string about_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  bool heard_ = false;
  bool said_ = false;
  std::string words_;
  Guardian guardian_;  // its thread uses all of the above
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_START_GUARD_H_
