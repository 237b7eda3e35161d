// What this rank is doing, in words, for peers that wait for it and for messages about failures.
#ifndef SMP_TF_OPS_CC_TRANSPORT_ACTIVITY_H_
#define SMP_TF_OPS_CC_TRANSPORT_ACTIVITY_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace smp {

class Activity {
 public:
  void BeginStep(uint64_t program, int64_t step);
  void EndStep(uint64_t program);
  void Set(const std::string& text);

  // Waits until this rank has begun, or ended, a step of a program or a later one; false after
  // `timeout_s`, or when nobody is to wait any longer.
  bool AwaitStep(uint64_t program, int64_t step, bool ended, double timeout_s) const;
  // Ends every AwaitStep, now and later.
  void StopAwaiting();

  // The step this rank is in or was in last; -1 before the first.
  int64_t step() const;
  // "step 12", "before the first step".
  std::string StepInWords() const;
  std::string InWords() const;

  struct Program {
    int64_t begun = -1;
    bool inside = false;
    bool averages = false;
  };
  std::map<uint64_t, Program> Programs() const;

  // Says that a program's steps end only when other ranks average with them.
  void SetAverages(uint64_t program);
  // How many such steps, of all programs, this rank has begun.
  int64_t averages() const;

  // This rank has come to something that other ranks take part in outside the transport, by its
  // name there, and is through it. What is left of a step that failed is forgotten at the next one,
  // and what is left of another graph that failed when its collective begins again.
  void BeginCollective(const std::string& name);
  void EndCollective(const std::string& name);

  // All of it at one moment. `step_seconds`: since the step began, or ended if not inside.
  struct Moment {
    bool inside = false;
    uint64_t program = 0;
    int64_t step = -1;
    double step_seconds = 0;
    std::string text;
    double text_seconds = 0;
    // What it has come to and is not through, the first one first; and since when of that.
    std::vector<std::string> collectives;
    double collective_seconds = 0;
  };
  Moment Now() const;

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool awaited_ = true;
  std::map<uint64_t, Program> programs_;
  int64_t averages_ = 0;
  uint64_t program_ = 0;
  int64_t step_ = -1;
  bool inside_ = false;
  Clock::time_point since_ = Clock::now();
  std::string text_;
  Clock::time_point text_since_;
  struct Collective {
    std::string name;
    Clock::time_point since;
  };
  std::vector<Collective>::iterator FindCollective(const std::string& name);  // under mutex_
  std::vector<Collective> collectives_;  // in the order in which they began
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_ACTIVITY_H_
