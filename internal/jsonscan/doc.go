// Package jsonscan reads JSON token by token, from a whole text or from pieces
// as they come off a network, and says where each token is. Everything of ours
// that looks into JSON without unmarshalling it reads through it, so that all
// agree about what a text says.
//
// It is strict: RFC 8259 to the letter, valid UTF-8, no lone surrogates, at most
// MaxDepth open objects and arrays. Keys may come twice; the caller sees both.
// It allocates nothing but what decoding an escaped string takes, and keeps of a
// token that is cut between two pieces no more than MaxToken bytes.
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
