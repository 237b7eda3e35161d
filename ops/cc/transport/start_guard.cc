#include "transport/start_guard.h"

#include <chrono>
#include <utility>

namespace smp {
namespace {

// The launcher kills seconds after its signal, and words may be looked for in vain.
constexpr auto kWordsTime = std::chrono::seconds(3);

GuardianOptions SignalsOnly() {
  GuardianOptions options;
  options.watch_launcher = false;
  return options;
}

}  // namespace

StartGuard::StartGuard(std::string about)
    : about_(std::move(about)),
      guardian_(SignalsOnly(), [this](const std::string&, const std::string& what, int exit_code) {
        OnSignal(what, exit_code);
      }) {}

void StartGuard::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  guardian_.Stop();
}

bool StartGuard::Wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_heard = [this] { return heard_ && !said_; };
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [&] { return over_ || is_heard(); });
  return is_heard();
}

void StartGuard::Say(const std::string& words) {
  std::lock_guard<std::mutex> lock(mutex_);
  words_ = words;
  said_ = true;
  changed_.notify_all();
}

void StartGuard::OnSignal(const std::string& what, int exit_code) {
  std::string line = about_ + " " + what + " in smp.init";
  {
    std::unique_lock<std::mutex> lock(mutex_);
    heard_ = true;
    changed_.notify_all();
    if (changed_.wait_for(lock, kWordsTime, [this] { return said_; })) line += words_;
  }
  guardian_.Failed(line + ".", exit_code);
  guardian_.Told();
}

}  // namespace smp
