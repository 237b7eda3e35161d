// Text that a terminal shows as it stands, whoever wrote it.
#ifndef SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_
#define SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_

#include <string>

namespace smp {

// Replaces what a terminal obeys in place of showing it: control characters, of which escape
// sequences are made, and bytes that are no UTF-8. Each comes out in words, such as \x1b. Ends of
// lines and tabs stay.
std::string PlainText(const std::string& text);

// The same, with a space for each end of a line.
std::string InOneLine(const std::string& text);

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_PLAIN_TEXT_H_
