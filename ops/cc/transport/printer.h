// Writes lines to standard error in a thread of its own, so that nobody else ever waits for whoever
// reads them: a pager, a terminal after Ctrl-S, a hung ssh.
//
//   any thread ── Say ──▶ queue ──▶ this thread ── write, as long as it takes ──▶ standard error
//                           └────▶ AwaitOut, until a deadline
#ifndef SMP_TF_OPS_CC_TRANSPORT_PRINTER_H_
#define SMP_TF_OPS_CC_TRANSPORT_PRINTER_H_

#include <chrono>
#include <memory>
#include <string>

namespace smp {

class Printer {
 public:
  Printer();
  // Leaves a thread that nobody reads from to itself; one that writes ends when all is out.
  ~Printer();

  // Has "smp_tf: <text>" printed, as one line in one write. Never waits. Of many lines that nobody
  // reads the last ones are dropped.
  void Say(const std::string& text);
  // Has what the streams of the C library hold written after that.
  void FlushStreams();
  // Waits until all of it is out, or until a deadline; returns whether it is.
  bool AwaitOut(std::chrono::steady_clock::time_point deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_PRINTER_H_
