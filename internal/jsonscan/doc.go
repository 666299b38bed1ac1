// Package jsonscan reads JSON token by token, from a whole text or from pieces
// as they come off a network, and says where each token is. All code that looks
// into JSON without unmarshalling it uses this package, so that all agree on what
// a text says.
//
// It is strict: RFC 8259 to the letter, valid UTF-8, no lone surrogates, at most
// MaxDepth open objects and arrays. The caller sees repeated keys. It allocates
// only to decode an escaped string, and keeps at most MaxToken bytes of a token
// that is cut between two pieces.
//
//	var s jsonscan.Scanner
//	s.Reset(text)
//	if s.Enter(jsonscan.Object) {
//		for s.Next() == jsonscan.Key {
//			switch string(s.Decoded()) {
//			case "model":
//				model = s.Raw()
//			default:
//				s.Skip()
//			}
//		}
//	}
//	if err := s.End(); err != nil { … }
package jsonscan
