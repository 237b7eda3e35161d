// Watches over the process: its launcher, its signals, and its end after a failure. It works while
// the main thread is stuck anywhere.
//
//   SIGINT, SIGTERM ─┐
//   launcher dies ───┼─▶ guardian ─▶ on_event (the transport makes it the cause)
//                    │
//   the cause ───────┴─▶ one line on stderr ─▶ grace time ─▶ _exit(code)
//                       (may be held, until a traceback is out)
//
// Lines go to stderr through the printer: the guardian never waits for whoever reads them.
#ifndef SMP_TF_OPS_CC_TRANSPORT_GUARDIAN_H_
#define SMP_TF_OPS_CC_TRANSPORT_GUARDIAN_H_

#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace smp {

struct GuardianOptions {
  bool watch_launcher = true;
  bool watch_signals = true;
  bool end_process = true;
  double grace_s = 4;
};

class Guardian {
 public:
  // `on_event(kind, what, exit_code)` is called on the guardian's thread, with kind "launcher" or
  // "signal" and words for what happened.
  using OnEvent = std::function<void(const std::string&, const std::string&, int)>;

  Guardian(const GuardianOptions& options, OnEvent on_event);
  ~Guardian();

  // SIGINT and SIGTERM are events from here on, if the options do not make them that at once.
  void WatchSignals();
  // There is a cause: print this line, now or when it is held no longer; end the process after the
  // grace time.
  void Failed(const std::string& line, int exit_code);
  // Holds the line of a failure for so many seconds, until this is called with 0, or until a signal
  // is to end the process. With 0 it is out when this returns, if there has been a failure and
  // somebody reads it.
  void HoldWords(double seconds);
  // Has a line of another kind printed; never waits.
  void Say(const std::string& text);
  // All ranks have been told: a process that a signal is to end need wait no longer.
  void Told();
  // Words for a signal that came and that the guardian is about to act on; "" if none came.
  std::string PendingSignal(int* exit_code) const;
  // Calls on_event no more. After Failed the watch over the process's end goes on.
  void Stop();

 private:
  void AwaitWords(std::unique_lock<std::mutex>* lock);

  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_GUARDIAN_H_
