// Text that a terminal shows as it stands, whoever wrote it.
#ifndef SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_
#define SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_

#include <string>

namespace smp {

// Writes control characters, and bytes that are not UTF-8, as text such as \x1b, so that a terminal
// shows them and does not obey them. Ends of lines and tabs stay.
std::string PlainText(const std::string& text);

// The same, with a space for each end of a line.
std::string InOneLine(const std::string& text);

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_
